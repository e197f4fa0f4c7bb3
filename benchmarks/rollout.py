"""Generation: the hybrid engine, with and without log-probs, against plain vllm.LLM.generate and vLLM's own scheduler.

python -m benchmarks.rollout --size 0.5b --prompts 64 --group 8
The floor: weights and KV cache read once per decode step, at the card's own copy bandwidth.
"""

import json
import re
import statistics
import time
from dataclasses import dataclass
from typing import Literal

import torch
import tyro

from benchmarks.common import SHAPES, copy_bandwidth, make_model, report
from hybrid_engine import HybridEngine, Sampling
from utils.dist import init_distributed, seed_for, world_mesh
from utils.models import load_policy


@dataclass
class Args:
    size: str = "0.5b"
    """0.5b, 1.5b or 7b."""
    prompts: int = 64
    """Prompts."""
    group: int = 8
    """Responses per prompt."""
    prompt_len: int = 128
    """Tokens of each prompt."""
    response_len: int = 512
    """Tokens of each response: random weights never end one."""
    rounds: int = 3
    """Rounds; every way of generating has its turn in each, and the median counts."""
    kv_cache_gib: float = 16.0
    """KV cache."""
    engine_args: str = "{}"
    """JSON, handed to vllm.LLM over what the hybrid engine sets: to compare settings."""
    against: Literal["vllm", "none"] = "vllm"
    """"none": leave LLM.generate out."""
    out: str = "benchmarks/results"
    """Folder for the JSON."""


def main(args: Args) -> None:
    mesh = world_mesh(init_distributed())
    path = str(make_model(args.size))
    requests = args.prompts * args.group
    longest = args.prompt_len + args.response_len
    how = {"max_model_len": longest, "max_num_seqs": requests, "kv_cache_gib": args.kv_cache_gib}
    how |= json.loads(args.engine_args)
    engine = HybridEngine(path, seed=1, eos_token_ids=[256], dtype=torch.bfloat16, **how)
    policy = load_policy(path, mesh, master_dtype=torch.bfloat16, compute_dtype=torch.bfloat16, trainable=False)
    engine.sync_weights(policy)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, 256, (args.prompts, args.prompt_len), generator=generator).tolist()

    def plain(_) -> int:  # without log-probs: vLLM's own outputs would find none (hybrid_engine.py)
        scheduler, kind = engine._scheduler, type(engine._scheduler)
        scheduler.__class__ = kind.__base__
        params = [
            engine.vllm.SamplingParams(
                temperature=1.0, max_tokens=args.response_len, seed=seed_for(i), detokenize=False,
                ignore_eos=True,
            )
            for i in range(requests)
        ]  # fmt: skip
        inputs = [{"prompt_token_ids": ids} for ids in prompts for _ in range(args.group)]
        outputs = engine.llm.generate(inputs, params, use_tqdm=False)
        scheduler.__class__ = kind
        return sum(len(o.outputs[0].token_ids) for o in outputs)

    def ours(logprobs: bool) -> int:
        sampling = Sampling(1.0, args.response_len, logprobs=logprobs)
        rollouts = engine.generate(prompts, range(args.prompts), n=args.group, step=0, sampling=sampling)
        return sum(len(r.response_ids) for r in rollouts)

    ways = {"reshard": (ours, False), "reshard, log-probs": (ours, True)}
    ways |= {"LLM.generate": (plain, False)} if args.against == "vllm" else {}
    rates = {name: [] for name in ways}
    for turn in range(args.rounds + 1):
        for name, (generate, logprobs) in ways.items():
            engine.llm.reset_prefix_cache()
            torch.cuda.synchronize()
            start = time.perf_counter()
            tokens = generate(logprobs)
            if turn:
                rates[name].append(tokens / (time.perf_counter() - start))
    hidden, _, layers, heads, kv_heads, *_ = SHAPES[args.size]
    weights = sum(p.numel() for p in policy.parameters()) * 2
    cached = 2 * 2 * layers * kv_heads * hidden // heads  # bytes of a token's keys and values
    mean_len = args.prompt_len + args.response_len / 2
    floor = requests / ((weights + requests * mean_len * cached) / (copy_bandwidth()))
    rows = []
    for name, seen in rates.items():
        rate = statistics.median(seen)
        over = {f"over {way}": rate / statistics.median(others) for way, others in rates.items() if "log" not in way}
        rows.append({
            "size": args.size, "responses": requests, "tokens": f"{args.prompt_len}+{args.response_len}", "way": name,
            "engine args": args.engine_args,
            "tokens/s": round(rate), "rounds": " ".join(f"{r:.0f}" for r in seen),
            "share of floor": rate / floor, **over,
        })  # fmt: skip
    settings = re.sub(r"\W+", "_", args.engine_args).rstrip("_")
    report(f"rollout_{args.size}_{requests}x{args.response_len}{settings}", rows, args.out)
    engine.close()


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__.splitlines()[0]))
