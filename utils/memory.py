"""GPU memory: what each phase of a run will hold, estimated before anything loads, and what a step did hold.

The estimate adds up tensors: weights, optimizer states, gradients, activations, the engine's weights and KV cache. What
libraries and CUDA graphs take beside them is OTHER. Activations are counted for a Llama-like block.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from accelerate import init_empty_weights
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from utils.dist import all_gather
from utils.forward import attention_shape
from utils.head import HEAD_CHUNK
from utils.preflight import flag

GIB = 2**30
BUCKET_BYTES = GIB  # of whole parameters whose parts a weight sync exchanges at once: what it costs in memory, twice
OTHER = 2.5 * GIB  # cuBLAS, NCCL, CUDA graphs: measured on two H200 with graphs for 480 sequences
GAPS = 0.065  # of what is free, between tensors in the allocator's blocks: where 7B ran out of memory on two H200
MARGIN = 0.15  # an estimate this far above what is free may still be wrong


def expandable_segments() -> str:
    """The setting, if it is made, of torch's allocator under which vLLM cannot sleep."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if "expandable_segments:True" in os.environ.get(name, ""):
            return f"{name}={os.environ[name]}"
    return ""


@dataclass
class Size:
    """Of a model, in parameters and bytes per token."""

    params: int
    block: int  # parameters of one block
    root: int  # of all that is in no block: embedding, head, last norm
    layers: int
    saved: int  # bytes that one block keeps for the backward pass, per token
    recomputed: int  # bytes per token that a block keeps when it is recomputed: its input
    vocabulary: int


@cache
def _parameters(kind: type[PreTrainedConfig], described: str) -> tuple[int, int]:
    """How many there are, and how many of them in blocks."""
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(kind.from_dict(json.loads(described)))
    model.tie_weights()
    blocks = sum(p.numel() for n, p in model.named_parameters() if ".layers." in n or ".h." in n)
    return sum(p.numel() for p in model.parameters()), blocks


def size_of(config: PreTrainedConfig, element: int, compiled: bool) -> Size:
    """Args: element: bytes of one activation; compiled: blocks fused, which keeps less of the norms and the MLP."""
    params, blocks = _parameters(type(config), config.to_json_string())
    layers, heads, kv_heads, head_size = attention_shape(config)
    hidden, width = config.hidden_size, getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    attention = 2 * heads * head_size + 2 * kv_heads * head_size  # q, k, v and the output
    # of the MLP gate, up and their product, eager silu's output too; of the norms inputs and outputs, eager in float32
    saved = attention + (4 * hidden + 3 * width if compiled else 8 * hidden + 4 * width)
    return Size(params, blocks // layers, params - blocks, layers, saved * element, hidden * element, config.vocab_size)


def kv_bytes_per_token(config: PreTrainedConfig, tensor_parallel_size: int, element: int) -> int:
    """Of keys and values on one rank of a tensor-parallel group."""
    layers, _, kv_heads, head_size = attention_shape(config)
    return 2 * layers * max(1, kv_heads // tensor_parallel_size) * head_size * element


def kv_cache_needed(flags: dict, config: PreTrainedConfig, world: int, num_val: int, element: int) -> float:
    """GiB per rank in which all responses that one replica generates at a time have room at their longest."""
    size, block = flags["tensor_parallel_size"], 16 if torch.cuda.is_available() else 128
    replicas = world // size
    at_once = max(flags["prompts_per_step"] * flags["group_size"], num_val) // replicas + 1
    longest = flags["max_prompt_len"] + flags["max_response_len"]
    tokens = (min(flags["max_num_seqs"], at_once) + 1) * (-(-longest // block) + 1) * block
    return tokens * kv_bytes_per_token(config, size, element) / GIB


def estimate(
    flags: dict, learners: list[PreTrainedConfig], frozen: list[PreTrainedConfig], world: int, element: int
) -> dict[str, dict[str, float]]:
    """Bytes on each GPU by phase (rollout, update) and item, for a vLLM that sleeps as `flags["sleep"]` says.

    Args: flags: values by name; learners: configs of what is trained, the policy first; frozen: reference and reward
        models; element: bytes of one weight in forward passes.
    """
    sizes = [size_of(config, element, flags["compile"]) for config in learners]
    others = [size_of(config, element, False) for config in frozen]
    offload, longest = flags["offload"], flags["max_prompt_len"] + flags["max_response_len"]
    if "pairs_per_step" in flags:
        sequences = 2 * flags["pairs_per_step"]
    else:
        sequences = flags["minibatch_size"] or flags["prompts_per_step"] * flags["group_size"]
    tokens = min(flags["max_tokens_per_gpu"], -(-sequences // world) * longest)
    held = {
        "weights": sum(4 * s.params / world for s in sizes) if offload != "all" else 0,
        "frozen models": sum(element * s.params / world for s in others),
        "optimizer": sum(8 * s.params / world for s in sizes) if offload == "none" else 0,
    }
    engine = {}
    if not flags.get("replay") and "sleep" in flags:
        engine = {
            "vLLM weights": element * sizes[0].params / flags["tensor_parallel_size"],
            "vLLM KV cache": flags["kv_cache_gib"] * GIB,
        }

    def gathered(s: Size) -> float:  # unsharded in the compute dtype; one rank keeps all its blocks
        return element * (s.params if world == 1 else s.root + 2 * s.block)

    checkpointing = flags["activation_checkpointing"]

    def of_a_block(s: Size) -> float:  # where the backward pass is: the recomputed block, and gradients in it
        return tokens * s.saved * (1.25 if checkpointing else 1)

    # bytes of a logit: value and gradient; eager kernels keep float32 copies; a reward model has none
    logit = 0 if "pairs_per_step" in flags else 2 * element if flags["compile"] else 16
    update = held | {
        # summed over micro-batches whole, in float32; a block's shards come when the whole goes
        "gradients": sum(4 * s.params for s in sizes),
        "gathered weights": sum(gathered(s) for s in sizes),
        "activations": max(tokens * s.layers * (s.recomputed if checkpointing else s.saved) for s in sizes),
        "logits or block": max(logit * HEAD_CHUNK * sizes[0].vocabulary, *(of_a_block(s) for s in sizes)),
    }
    asleep = {"none": engine, "kv": {k: v for k, v in engine.items() if k == "vLLM weights"}, "all": {}}
    phases = {"update": update | asleep[flags.get("sleep", "none")]}
    if engine:
        sampling = 4 * 4 * flags["max_num_seqs"] * sizes[0].vocabulary
        phases = {"rollout": held | engine | {"sampling": sampling}} | phases
        if world > 1:
            exchange = 2 * max(BUCKET_BYTES, *(element * part for s in sizes[:1] for part in (s.root, s.block)))
            phases["sync"] = held | (engine if flags["sleep"] == "none" else asleep["kv"]) | {"exchange": exchange}
    return phases


def plan_memory(
    flags: dict, learners: list[PreTrainedConfig], frozen: list[PreTrainedConfig], world: int, num_val: int = 0
) -> tuple[dict, str]:
    """Settle --kv-cache-gib 0 and --sleep auto by what this GPU has free, and say what each phase will hold.

    Returns: the settled flags, alike on every rank (collective), and the table to print.
    Raises: ValueError naming flags to change, where a phase is MARGIN over what is free.
    """
    on_cuda = torch.cuda.is_available()
    host = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / world  # as if all ranks were on this one
    free = min(all_gather(torch.cuda.mem_get_info()[0] if on_cuda else host)) - OTHER
    return settle(flags, learners, frozen, world, num_val, free, on_cuda)


def settle(
    flags: dict,
    learners: list[PreTrainedConfig],
    frozen: list[PreTrainedConfig],
    world: int,
    num_val: int,
    free: float,
    on_cuda: bool,
) -> tuple[dict, str]:
    """`plan_memory` for a GPU with `free` bytes, or for a CPU, where nothing sleeps and nothing is refused."""

    def plan(**more) -> tuple[dict, dict[str, dict[str, float]]]:
        return _choose(flags | more, learners, frozen, world, num_val, free, on_cuda)

    settled, phases = plan()
    rows = []
    for phase, items in phases.items():
        shown = ", ".join(f"{name} {size / GIB:.1f}" for name, size in items.items() if size >= 0.05 * GIB)
        rows.append(f"  {phase:8} {sum(items.values()) / GIB:6.1f} GiB: {shown}")
    table = f"memory of a rank, estimated ({free / GIB:.1f} GiB are free for it):\n" + "\n".join(rows)
    phase, items = max(phases.items(), key=lambda each: sum(each[1].values()))
    need = sum(items.values())
    if on_cuda and need > (1 + MARGIN) * free:
        raise ValueError(
            f"memory: the {phase} phase needs about {need / GIB:.0f} GiB on each GPU and {free / GIB:.0f} are free "
            f"(most of it {max(items, key=items.get)}); {_remedy(flags, free, plan)}\n{table}"
        )
    if on_cuda and sum(phases["update"].values()) > (1 - GAPS) * free:
        gaps = f"gaps between its tensors can take {GAPS * free / GIB:.0f} GiB more"
        table += f"\n  tight: the update may not fit, {gaps}; a smaller --max-tokens-per-gpu makes room"
    return settled, table


def _choose(
    flags: dict, learners: list, frozen: list, world: int, num_val: int, free: float, on_cuda: bool
) -> tuple[dict, dict[str, dict[str, float]]]:
    """--kv-cache-gib and --sleep where the flags leave them open, and what each phase then holds."""
    settled, element = {}, 2 if flags["dtype"] == "bfloat16" else 4
    safe = free / (1 + MARGIN)  # what is chosen here must fit even where the estimate is too low
    has_engine = "sleep" in flags and not flags["replay"]
    if has_engine and not flags["kv_cache_gib"]:
        settled["kv_cache_gib"] = round(kv_cache_needed(flags, learners[0], world, num_val, element) + 0.005, 2)

    def phases(**more) -> dict[str, dict[str, float]]:
        return estimate(flags | settled | more, learners, frozen, world, element)

    if flags.get("sleep") == "auto" and not has_engine:
        settled["sleep"] = "none"
    elif has_engine and flags["sleep"] == "auto":
        fits = [how for how in ("none", "kv") if sum(phases(sleep=how)["update"].values()) < safe or not on_cuda]
        settled["sleep"] = "none" if expandable_segments() else fits[0] if fits else "all"
    if has_engine and not flags["kv_cache_gib"]:  # less is slower, and still right
        least = kv_bytes_per_token(learners[0], flags["tensor_parallel_size"], element) / GIB
        least *= 16 * (flags["max_prompt_len"] + flags["max_response_len"])
        over = max(sum(items.values()) for items in phases().values() if "vLLM KV cache" in items) - safe
        needed = settled["kv_cache_gib"]
        settled["kv_cache_gib"] = max(needed - max(0.0, over) / GIB, min(needed, least))
    return settled, phases()


def _remedy(flags: dict, free: float, plan: Callable) -> str:
    """The flags which together make room by the estimate, the cheapest first; `plan(**flags)` is settle's."""

    def over(**more) -> float:  # bytes too many, over all phases
        return sum(max(0.0, sum(items.values()) - (1 - GAPS) * free) for items in plan(**more)[1].values())

    tokens, longest = flags["max_tokens_per_gpu"], flags["max_prompt_len"] + flags["max_response_len"]
    longest *= 2 if "pairs_per_step" in flags else 1
    budgets = [("max_tokens_per_gpu", tokens >> k) for k in range(1, 20) if tokens >> k >= longest]
    tries = [("sleep", "auto"), ("kv_cache_gib", 0), ("max_num_seqs", max(1, flags.get("max_num_seqs", 1) // 4))]
    tries += [("compile", True), ("activation_checkpointing", True), *budgets]
    tries += [("offload", "optimizer"), ("offload", "all")]
    chosen, missing = {}, over()
    for name, value in tries:
        if missing and name in flags and (less := over(**(chosen | {name: value}))) < missing - 0.01 * free:
            chosen[name], missing = value, less  # what saves next to nothing is not worth its price
    for name in reversed(list(chosen)):  # what came later may have made it needless, or less of it enough
        fewer = {k: v for k, v in chosen.items() if k != name}
        if over(**fewer) <= missing:
            chosen = fewer
        elif name == "max_tokens_per_gpu":
            chosen[name] = next(budget for _, budget in budgets if over(**fewer, max_tokens_per_gpu=budget) <= missing)
    words = " ".join(flag(name, chosen) for name in chosen) or "no flag"
    need = max(sum(items.values()) for items in plan(**chosen)[1].values())
    if need <= (1 - GAPS) * free:
        return f"{words} would make room"
    rest = "which may fit" if need <= (1 + MARGIN) * free else "and more GPUs are needed"
    return f"{words} would leave {need / GIB:.0f} GiB, {rest}"


def ledger(parts: dict, engine, grown: dict[str, float]) -> dict[str, float]:
    """GiB on this rank's GPU: weights, optimizer states and gradients of what is trained, vLLM's weights and KV cache.

    Gradients are the shards', as large as the weights; mem/activations_gib is what else the update took at its peak:
    activations, gathered weights, logits, and on several ranks gradients summed before they are shared out.
    Args: parts: {name: (model, optimizer)}; grown: `Metrics.grown`. Empty without a GPU.
    """
    if not torch.cuda.is_available():
        return {}

    def on_device(tensors) -> float:
        mine = (t.to_local() if isinstance(t, DTensor) else t for t in tensors)
        return sum(t.nbytes for t in mine if t.is_cuda) / GIB

    weights = [p.detach() for model, _ in parts.values() for p in model.parameters()]
    states = [t for _, o in parts.values() for state in o.state.values() for t in state.values()]
    held = on_device(weights)
    return {
        "mem/weights_gib": held,
        "mem/optimizer_gib": on_device(states),
        "mem/gradients_gib": held,
        "mem/activations_gib": grown["update"] - held,
        **engine.memory(),
    }
