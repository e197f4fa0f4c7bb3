"""Weight sync: FSDP2 shards into vLLM's storage, against a plain device copy of the same bytes.

python -m benchmarks.sync --size 0.5b
The floor: the master weights read once, and the engine's written once, at the card's own copy bandwidth.
"""

import statistics
from dataclasses import dataclass

import torch
import tyro

from benchmarks.common import copy_bandwidth, make_model, report, timed
from hybrid_engine import HybridEngine
from utils.dist import init_distributed, world_mesh
from utils.models import load_policy


@dataclass
class Args:
    size: str = "0.5b"
    """0.5b, 1.5b or 7b."""
    master_dtype: str = "float32"
    """Of the sharded weights."""
    rounds: int = 10
    """Syncs that are measured."""
    out: str = "benchmarks/results"
    """Folder for the JSON."""


def main(args: Args) -> None:
    mesh = world_mesh(init_distributed())
    path, bf16 = str(make_model(args.size)), torch.bfloat16
    engine = HybridEngine(path, seed=1, eos_token_ids=[256], max_model_len=256, dtype=bf16, enforce_eager=True)
    policy = load_policy(path, mesh, master_dtype=getattr(torch, args.master_dtype), compute_dtype=bf16)
    first = engine.sync_weights(policy)
    reports = [engine.sync_weights(policy) for _ in range(args.rounds)]
    copied = statistics.median(r.seconds - r.reset_seconds for r in reports)
    weights = [p.data for p in engine.model().parameters()]
    other = [torch.empty_like(p) for p in weights]
    plain = timed(lambda: torch._foreach_copy_(other, weights))
    read = sum(p.numel() * p.element_size() for p in policy.parameters())
    floor = (read + reports[0].num_bytes) / copy_bandwidth()
    row = {
        "size": args.size, "master": args.master_dtype, "GB": reports[0].num_bytes / 1e9, "first sync s": first.seconds,
        "copy ms": copied * 1e3, "reset ms": statistics.median(r.reset_seconds for r in reports) * 1e3,
        "plain copy ms": plain * 1e3, "over plain copy": copied / plain, "floor ms": floor * 1e3,
        "verify s": engine.verify_sync(policy),
    }  # fmt: skip
    report(f"sync_{args.size}_{args.master_dtype}", [row], args.out)
    engine.close()


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__.splitlines()[0]))
