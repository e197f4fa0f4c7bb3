"""AdamW whose moments live on the host, a chunk of parameters at a time: AdamW to the bit, and resumed so."""

import pytest
import torch
from conftest import make_model, sequences

from utils import optim
from utils.checkpoint import load_checkpoint, save_checkpoint
from utils.models import load_policy
from utils.packing import pack


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(make_model(tmp_path_factory.mktemp("optim") / "m"))


def steps(policy, optimizer, number):
    for _ in range(number):
        packed = pack(sequences([[1, 2], [3]], [[4, 5], [6, 7, 8]]), torch.device("cpu"))
        policy(packed, 1.0)[0].sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def load(path, mesh, offload):
    policy = load_policy(path, mesh, master_dtype=torch.float32, compute_dtype=torch.float32)
    return policy, optim.make_adamw(policy, 1e-2, 0.1, offload)


def test_chunk_by_chunk_is_all_at_once(process_group, path, tmp_path, monkeypatch):
    monkeypatch.setattr(optim, "CHUNK_BYTES", 2**17)
    plain, host = load(path, process_group, "none"), load(path, process_group, "optimizer")
    chunks = list(optim._chunks(host[1].param_groups[0]["params"]))
    assert len(chunks) > 5 and sum(map(len, chunks)) == len(list(host[0].parameters()))
    steps(*plain, 2), steps(*host, 2)
    saved = save_checkpoint(tmp_path, 2, {"policy": host}, {"checksums": False, "keep_checkpoints": 0}, {})
    resumed = load(path, process_group, "optimizer")
    load_checkpoint(saved, {"policy": resumed})
    for each in (plain, host, resumed):
        steps(*each, 2)
    for mine in (host, resumed):
        for a, b in zip(mine[0].parameters(), plain[0].parameters(), strict=True):
            assert torch.equal(a.full_tensor(), b.full_tensor())
