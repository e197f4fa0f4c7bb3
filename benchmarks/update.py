"""Forward and backward of the GRPO loss over packed micro-batches, and the optimizer step; share of the card's FLOP/s.

python -m benchmarks.update --size 0.5b --sequences 512                                      # or on several GPUs:
torchrun --nproc-per-node 2 -m benchmarks.update --size 0.5b --sequences 512
FLOPs are counted as 6 per parameter and token plus causal attention (recomputed ones do not count). The floor is the
same count at the rate of one large matrix product, or at that of a block's own products alone, back to back; these of
zeros too, which draw less power: what that gains shows what the card's power limit may take.
"""

import time
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import tyro

from benchmarks.common import PEAK_FLOPS, SHAPES, block_matmul_rate, make_model, matmul_rate, report, timed
from grpo_fsdp import policy_loss
from utils.dist import init_distributed, world_mesh
from utils.models import load_policy
from utils.optim import begin_micro_batch, optimizer_step
from utils.packing import pack, plan_together


@dataclass
class Args:
    size: str = "0.5b"
    """0.5b, 1.5b or 7b."""
    sequences: int = 256
    """Responses of an optimizer step on each GPU."""
    prompt_len: int = 128
    """Tokens of each prompt."""
    response_len: int = 512
    """Tokens of each response; with --ragged, of the longest one."""
    ragged: bool = False
    """Responses of 1 to --response-len tokens instead of all alike."""
    max_tokens_per_gpu: int = 32768
    """Packed tokens of a micro-batch."""
    compile: bool = True
    """As the scripts' --compile."""
    activation_checkpointing: bool = False
    """As the scripts' flag."""
    master_dtype: str = "float32"
    """Of parameters and optimizer states."""
    rounds: int = 3
    """Steps, after two to warm up."""
    profile: bool = False
    """Print the device's 25 most expensive kernels of one step."""
    out: str = "benchmarks/results"
    """Folder for the JSON."""


def train_on(batch: list, parts: dict, max_tokens: int, width: int, device: torch.device) -> None:
    """One optimizer step on these sequences, as in phase 6 of grpo_fsdp.py, with advantages of 1."""
    policy, world = parts["policy"][0], torch.distributed.get_world_size()
    plan, tokens = plan_together(batch, range(len(batch)), max_tokens)
    for k, part in enumerate(plan):
        begin_micro_batch(policy, k == len(plan) - 1)
        packed = pack([batch[i] for i in part], device)
        logprobs_N, _ = policy(packed, 1.0)
        logprobs_bR = packed.to_padded(logprobs_N, len(part), width)
        advantages = torch.ones(len(part), 1, device=device)
        loss_bR, _, _ = policy_loss(logprobs_bR, logprobs_bR.detach(), advantages, 0.2, 0.2)
        (loss_bR.sum() / tokens * world).backward()
    optimizer_step(parts, {"policy": 1e-6}, 1.0, lambda norms: bool(norms["policy"].isfinite()))


def main(args: Args) -> None:
    device = init_distributed()
    world = torch.distributed.get_world_size()
    master = getattr(torch, args.master_dtype)
    policy = load_policy(
        str(make_model(args.size)), world_mesh(device), master_dtype=master, compute_dtype=torch.bfloat16,
        compile_blocks=args.compile, activation_checkpointing=args.activation_checkpointing,
    )  # fmt: skip
    parts = {"policy": (policy, torch.optim.AdamW(policy.parameters(), lr=1e-6, fused=True))}
    generator = torch.Generator().manual_seed(0)

    def ids(n: int) -> list[int]:
        return torch.randint(0, 256, (n,), generator=generator).tolist()

    low = 1 if args.ragged else args.response_len
    lengths = torch.randint(low, args.response_len + 1, (args.sequences,), generator=generator).tolist()
    batch = [SimpleNamespace(prompt_ids=ids(args.prompt_len), response_ids=ids(n)) for n in lengths]

    def step() -> None:
        train_on(batch, parts, args.max_tokens_per_gpu, args.response_len, device)

    start = time.perf_counter()
    step()
    first = time.perf_counter() - start
    torch.cuda.reset_peak_memory_stats()
    seconds = timed(step, args.rounds)
    hidden, _, layers, *_ = SHAPES[args.size]
    params = sum(p.numel() for p in policy.parameters())
    whole = [args.prompt_len + n for n in lengths]
    flops = 6 * params * sum(whole) + sum(6 * layers * hidden * n * n for n in whole)
    settings = "compiled" * args.compile + " checkpointed" * args.activation_checkpointing + " ragged" * args.ragged
    peak = torch.cuda.max_memory_allocated()
    rates = {"one product": matmul_rate()}
    for name, fill in {"block's products": torch.randn, "block's products of zeros": torch.zeros}.items():
        rates[name] = block_matmul_rate(args.size, args.max_tokens_per_gpu, fill)
    row = {
        "size": args.size, "GPUs": world, "sequences": f"{args.sequences} x {args.prompt_len}+{args.response_len}",
        "settings": settings.strip() or "eager", "tokens/s a GPU": round(sum(whole) / seconds), "s/step": seconds,
        "TFLOP/s": flops / seconds / 1e12, "share of 989": flops / seconds / PEAK_FLOPS,
        **{f"{name}, TFLOP/s": rate / 1e12 for name, rate in rates.items()},
        **{f"share of {name}": flops / seconds / rate for name, rate in rates.items()}, "peak GiB": peak / 2**30,
        "first step s": first, "graphs": torch._dynamo.utils.counters["stats"].get("unique_graphs", 0),
    }  # fmt: skip
    if args.profile:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step()
        print(profile.key_averages().table(sort_by="cuda_time_total", row_limit=25, max_name_column_width=70))
    report(f"update_{args.size}_{world}_{settings.strip().replace(' ', '_') or 'eager'}", [row], args.out)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__.splitlines()[0]))
