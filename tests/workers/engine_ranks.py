"""torchrun --nproc-per-node N tests/workers/engine_ranks.py MODEL TP OUT: what each rank's engine holds and samples."""

import json
import sys

import torch
import torch.distributed as dist

from hybrid_engine import HybridEngine, Rollout, Sampling
from utils import reshard
from utils.dist import all_gather, init_distributed, world_mesh
from utils.models import hf_name, load_policy
from utils.packing import pack

reshard.BUCKET_BYTES = 2**19  # so that the exchange takes several
path, tp, out = sys.argv[1], int(sys.argv[2]), sys.argv[3]
mesh = world_mesh(init_distributed())
rank, world = mesh.get_rank(), mesh.size()
engine = HybridEngine(path, seed=1, max_model_len=64, eos_token_ids=[5, 6], tensor_parallel_size=tp, kv_cache_gib=0.125)
policy = load_policy(path, mesh, master_dtype=torch.float32, compute_dtype=torch.float32)
engine.sync_weights(policy)
assert len(engine._buckets) == 3, f"{len(engine._buckets)} buckets"
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
warm = [Rollout(0, 0, [1, 2], [4, 5], [], ""), Rollout(1, 0, [3], [6, 7, 8], [], "")]
policy(pack(warm, torch.device("cpu")), 1.0)[0].sum().backward()
optimizer.step()
optimizer.zero_grad()


def mismatched() -> list[str]:
    """Engine parameters of this rank that are not the trainer's slice, worked out by hand from Qwen2's layout."""
    t, i = engine.tp_size, engine.tp_rank
    full = {hf_name(name): param.full_tensor() for name, param in policy.named_parameters()}
    wrong = []
    for name, param in engine.model().named_parameters():
        if "qkv_proj" in name:
            want = torch.cat([full[name.replace("qkv_proj", f"{c}_proj")].chunk(t)[i] for c in "qkv"])
        elif "gate_up_proj" in name:
            want = torch.cat([full[name.replace("gate_up", c)].chunk(t)[i] for c in ("gate", "up")])
        elif "o_proj" in name or "down_proj" in name:
            want = full[name].chunk(t, dim=1)[i]
        elif "embed_tokens" in name or "lm_head" in name:
            rows = len(param)  # the padded vocabulary, split evenly
            want = full[name][i * rows : (i + 1) * rows]
        else:
            want = full[name]
        if not torch.equal(param[: len(want)], want):
            wrong.append(name)
    return wrong


before = mismatched()
engine.sync_weights(policy)
after = mismatched()
engine.verify_sync(policy)
with torch.no_grad():  # one rank's engine goes stale in one slice
    if rank == world - 1:
        engine.model().model.layers[1].mlp.down_proj.weight[3] += 0.01
proof = ""
try:
    engine.verify_sync(policy)
except SystemExit as ending:
    proof = str(ending)
engine.sync_weights(policy)

uids = list(range(6)) if world == 1 else [[0, 1, 2, 3], [4, 5]][rank]  # not as many on each rank
prompts = [[10 + u] * (u + 1) for u in uids]
finished = []
rollouts = engine.generate(
    prompts, uids, n=3, step=2, sampling=Sampling(1.0, 16), on_finish=lambda r: finished.append((r.uid, r.sample))
)
assert sorted(finished) == sorted((r.uid, r.sample) for r in rollouts), "on_finish is for this rank's responses alone"
assert [r.uid for r in rollouts] == [u for u in uids for _ in range(3)]
packed = pack(rollouts, torch.device("cpu"))
with torch.no_grad():
    trainer = policy(packed, 1.0)[0]
difference = (trainer - torch.tensor([x for r in rollouts for x in r.logprobs])).abs().max().item()
empty = engine.generate([[1]] if rank == 0 else [], [99] if rank == 0 else [], n=1, step=3, sampling=Sampling(0.0, 4))
# one prompt for all: what tells the ranks' samples apart is the uid alone
same = engine.generate([[7, 7, 7]], [50 + rank], n=4, step=4, sampling=Sampling(1.0, 16))
mine = {
    "same_prompt": [r.response_ids for r in same],
    "before": before,
    "after": after,
    "proof": proof,
    "num_params": len(list(engine.model().parameters())),
    "difference": difference,
    "samples": {f"{r.uid}/{r.sample}": [r.response_ids, r.logprobs] for r in rollouts},
    "empty": len(empty),
}
everyone = all_gather(mine)
if rank == 0:
    with open(out, "w") as file:
        json.dump(everyone, file)
dist.barrier()
