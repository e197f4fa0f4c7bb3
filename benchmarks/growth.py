"""Time of a GRPO step's phases as it grows: in responses, and in response length; one engine and one policy for all.

python -m benchmarks.growth --size 0.5b
Each point is the second of two rounds of rollout, update (one optimizer step) and weight sync.
"""

import time
from dataclasses import dataclass
from itertools import pairwise

import torch
import tyro

from benchmarks.common import make_model, report
from benchmarks.update import train_on
from hybrid_engine import HybridEngine, Sampling
from utils.dist import init_distributed, world_mesh
from utils.memory import kv_cache_needed
from utils.models import load_config, load_policy


@dataclass
class Args:
    size: str = "0.5b"
    """0.5b, 1.5b or 7b."""
    responses: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048)
    """Responses per step, of --response-len tokens."""
    lengths: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096)
    """Tokens per response, of --length-responses responses."""
    response_len: int = 512
    """Where the responses grow."""
    length_responses: int = 128
    """Where the length grows."""
    prompt_len: int = 128
    """Tokens of each prompt."""
    max_num_seqs: int = 512
    """Responses that are generated at the same time."""
    max_tokens_per_gpu: int = 32768
    """Packed tokens of a micro-batch."""
    out: str = "benchmarks/results"
    """Folder for the JSON."""


def main(args: Args) -> None:
    device = init_distributed()
    path, longest = str(make_model(args.size)), args.prompt_len + max(*args.lengths, args.response_len)
    most = max(*args.responses, args.length_responses)
    sizes = {"tensor_parallel_size": 1, "prompts_per_step": most, "group_size": 1}
    sizes |= {"max_prompt_len": 0, "max_response_len": longest, "max_num_seqs": args.max_num_seqs}
    engine = HybridEngine(
        path, seed=1, eos_token_ids=[256], dtype=torch.bfloat16, max_model_len=longest, max_num_seqs=args.max_num_seqs,
        kv_cache_gib=kv_cache_needed(sizes, load_config(path), 1, 0, 2),
    )  # fmt: skip
    policy = load_policy(
        path, world_mesh(device), master_dtype=torch.float32, compute_dtype=torch.bfloat16, compile_blocks=True
    )
    parts = {"policy": (policy, torch.optim.AdamW(policy.parameters(), lr=1e-6, fused=True))}
    engine.sync_weights(policy)
    generator, rows = torch.Generator().manual_seed(0), []
    grown = [("responses", n, args.response_len) for n in args.responses]
    grown += [("length", args.length_responses, length) for length in args.lengths]
    for what, responses, length in grown:
        for turn in range(2):
            prompts = torch.randint(0, 256, (responses // 8, args.prompt_len), generator=generator).tolist()
            clock = [time.perf_counter()]

            def lap(clock=clock) -> None:
                torch.cuda.synchronize()
                clock.append(time.perf_counter())

            sampling = Sampling(1.0, length)
            batch = engine.generate(prompts, range(len(prompts)), n=8, step=turn, sampling=sampling)
            lap()
            train_on(batch, parts, args.max_tokens_per_gpu, length, device)
            lap()
            engine.sync_weights(policy)
            lap()
        seconds = [b - a for a, b in pairwise(clock)]
        tokens = sum(len(r.response_ids) for r in batch)
        rows.append({
            "grows": what, "responses": responses, "length": length, "s": sum(seconds), "rollout s": seconds[0],
            "update s": seconds[1], "sync s": seconds[2], "rollout share": seconds[0] / sum(seconds),
            "rollout tokens/s": round(tokens / seconds[0]),
            "update tokens/s": round((tokens + responses * args.prompt_len) / seconds[1]),
        })  # fmt: skip
        report(f"growth_{args.size}", rows, args.out)
    engine.close()


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__.splitlines()[0]))
