"""Slices of whole parameters split by the shards that hold their rows, whatever view of them a loader takes."""

import pytest
import torch

from utils.reshard import Slice, by_shard

VIEWS = {
    "whole": lambda w: w,
    "rows": lambda w: w[2:9],
    "one row": lambda w: w[4:5],
    "columns": lambda w: w[:, 3:7],
    "rows and columns": lambda w: w[5:11, 1:2],
    "turned": lambda w: w.t(),  # GPT-2's linear weights
    "turned columns": lambda w: w.t()[2:5],
    "heads": lambda w: w.view(3, 4, 8),
    "a part of each head": lambda w: w.view(3, 4, 8)[:, 1:3],
    "every other row": lambda w: w[::2],
    "nothing": lambda w: w[3:3],
}


@pytest.mark.parametrize("world", [1, 2, 5, 7, 16])
@pytest.mark.parametrize("view", VIEWS)
def test_the_parts_of_all_shards_make_the_slice(view, world):
    whole = torch.randn(12, 8)
    source = VIEWS[view](whole)
    destination = torch.full(source.shape, torch.nan)
    piece = Slice("w", tuple(source.shape), source.stride(), source.storage_offset(), destination)
    shards = [*whole.chunk(world), *[whole[:0]] * world][:world]  # as FSDP2 lays them out
    for rank, part in by_shard(piece, whole.shape, world):
        shard = shards[rank].clone()
        assert part.offset + sum((n - 1) * s for n, s in zip(part.size, part.stride, strict=True)) < shard.numel()
        part.destination.copy_(part.of(shard))
    assert torch.equal(destination, source)


@pytest.mark.parametrize("view", [lambda w: w.view(-1)[5:30], lambda w: w.view(3, -1)[:, 2:30]])
def test_a_slice_that_runs_on_into_the_next_row_is_no_slice_of_rows(view):
    source = view(torch.randn(12, 8))
    piece = Slice("w", tuple(source.shape), source.stride(), source.storage_offset(), torch.empty(source.shape))
    with pytest.raises(AssertionError, match="w: a slice that runs on"):
        list(by_shard(piece, torch.Size([12, 8]), 2))


@pytest.mark.parametrize("world", [1, 3, 4])
def test_of_a_vector(world):
    whole = torch.randn(10)
    destination = torch.empty(5)
    for rank, part in by_shard(Slice("b", (5,), (1,), 3, destination), whole.shape, world):
        part.destination.copy_(part.of([*whole.chunk(world), *[whole[:0]] * world][rank].clone()))
    assert torch.equal(destination, whole[3:8])
