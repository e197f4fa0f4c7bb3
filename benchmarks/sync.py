"""Weight sync: FSDP2 shards into vLLM's storage, against a plain device copy of the same bytes.

python -m benchmarks.sync --size 0.5b                                                        # or on several GPUs:
torchrun --nproc-per-node 2 -m benchmarks.sync --size 0.5b --tensor-parallel-size 2
The floor: the master weights read once and the engine's written once at the card's own copy bandwidth, and the bytes
that other ranks hold received at the measured bandwidth of an all-gather.
"""

import statistics
from dataclasses import dataclass

import torch
import tyro

from benchmarks.common import copy_bandwidth, gather_bandwidth, make_model, report, timed
from hybrid_engine import HybridEngine
from utils.dist import init_distributed, world_mesh
from utils.models import load_policy


@dataclass
class Args:
    size: str = "0.5b"
    """0.5b, 1.5b or 7b."""
    master_dtype: str = "float32"
    """Of the sharded weights."""
    tensor_parallel_size: int = 1
    """Ranks that hold one replica of the engine."""
    rounds: int = 10
    """Syncs that are measured."""
    out: str = "benchmarks/results"
    """Folder for the JSON."""


def main(args: Args) -> None:
    mesh = world_mesh(init_distributed())
    path, bf16 = str(make_model(args.size)), torch.bfloat16
    engine = HybridEngine(
        path, seed=1, eos_token_ids=[256], max_model_len=256, dtype=bf16, enforce_eager=True,
        tensor_parallel_size=args.tensor_parallel_size,
    )  # fmt: skip
    policy = load_policy(path, mesh, master_dtype=getattr(torch, args.master_dtype), compute_dtype=bf16)
    first = engine.sync_weights(policy)
    reports = [engine.sync_weights(policy) for _ in range(args.rounds)]
    copied = statistics.median(r.seconds - r.reset_seconds for r in reports)
    weights = [p.data for p in engine.model().parameters()]
    other = [torch.empty_like(p) for p in weights]
    plain = timed(lambda: torch._foreach_copy_(other, weights))
    world = mesh.size()
    read = sum(p.numel() * p.element_size() for p in policy.parameters()) / world
    floor = (read + reports[0].num_bytes) / copy_bandwidth()
    row = {"size": args.size, "GPUs": world, "TP": args.tensor_parallel_size, "master": args.master_dtype}
    if world > 1:
        received, rate = reports[0].received_bytes, gather_bandwidth()
        floor += received / rate
        row |= {"received GB": received / 1e9, "all-gather GB/s": rate / 1e9, "GB/s": received / copied / 1e9}
    row |= {
        "GB": reports[0].num_bytes / 1e9, "first sync s": first.seconds,
        "copy ms": copied * 1e3, "reset ms": statistics.median(r.reset_seconds for r in reports) * 1e3,
        "plain copy ms": plain * 1e3, "over plain copy": copied / plain, "floor ms": floor * 1e3,
        "verify s": engine.verify_sync(policy),
    }  # fmt: skip
    report(f"sync_{args.size}_{args.master_dtype}_{world}_{args.tensor_parallel_size}", [row], args.out)
    engine.close()


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__.splitlines()[0]))
