"""Training shards -> the inference engine's own tensors: which part of whose shard goes where, and the transfer.

`record_plan` replays vLLM's own `load_weights` under a dispatch mode that notes every copy it makes (which slice of
which checkpoint tensor goes where). Fusion of q/k/v and gate/up, tensor-parallel slicing and vocabulary padding are
thereby captured for any dense architecture, with no code per model. `plan_exchange` splits those slices by the ranks
that hold their rows; each rank tells the others what its engine needs. `transfer` copies what a rank holds itself
straight from its shards, and exchanges the rest: no parameter is ever whole on the way, nothing travels twice.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from utils.dist import all_gather
from utils.memory import BUCKET_BYTES
from utils.models import hf_name


class _RecordCopies(TorchDispatchMode):
    """Runs everything as usual and notes the tensors that are copied into or filled."""

    def __init__(self):
        super().__init__()
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.fills: list[torch.Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            self.copies.append((args[0], args[1]))
        elif func in (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default):
            self.fills.append(args[0])
        return func(*args, **(kwargs or {}))


@dataclass
class Slice:
    """A view of one parameter, given by its place there in elements, and the engine tensor it is copied to."""

    name: str  # of the parameter, inside its FSDP module
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    destination: torch.Tensor

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)


@dataclass
class Unit:
    """One FSDP module's share of the copy plan."""

    module: FSDPModule
    names: dict[str, str]  # parameter name inside the module -> in the checkpoint
    slices: list[Slice]

    def fed(self) -> dict[str, torch.Tensor]:
        """The unsharded tensors as `load_weights` takes them, by their name in the checkpoint."""
        params = dict(self.module.named_parameters())
        return {name: params[inner].detach() for inner, name in self.names.items()}


def by_shard(piece: Slice, shape: torch.Size, world: int) -> Iterator[tuple[int, Slice]]:
    """Split a slice of a whole parameter by the ranks that hold its rows: (rank, the part as a slice of its shard).

    FSDP2 gives each rank ceil(rows / world) of them in order, the last ones fewer or none.
    """
    row = math.prod(shape[1:])
    across = [d for d, n in enumerate(piece.size) if n > 1 and piece.stride[d] and piece.stride[d] % row == 0]
    if len(across) > 1 or any(piece.stride[d] != row for d in across):  # rows seen as heads x rows, say: one by one
        d = max(across, key=lambda d: piece.stride[d])
        for i in range(piece.size[d]):
            size, stride = (x[:d] + x[d + 1 :] for x in (piece.size, piece.stride))
            offset, destination = piece.offset + i * piece.stride[d], piece.destination.select(d, i)
            yield from by_shard(Slice(piece.name, size, stride, offset, destination), shape, world)
        return
    first, rest = divmod(piece.offset, row)
    inside = [(n - 1) * s for d, (n, s) in enumerate(zip(piece.size, piece.stride, strict=True)) if d not in across]
    assert 0 in piece.size or rest + sum(inside) < row, f"{piece.name}: a slice that runs on into the next row"
    count, per_rank = (piece.size[across[0]] if across else 1), -(-shape[0] // world)
    for rank in range(first // per_rank, (first + count - 1) // per_rank + 1):
        low, high = max(first, rank * per_rank), min(first + count, (rank + 1) * per_rank)
        size, destination = piece.size, piece.destination
        if across:
            d = across[0]
            size, destination = (*size[:d], high - low, *size[d + 1 :]), destination.narrow(d, low - first, high - low)
        yield rank, Slice(piece.name, size, piece.stride, (low - rank * per_rank) * row + rest, destination)


@dataclass
class Bucket:
    """What some FSDP modules' weights take on this rank: copies from its own shards, and what it sends and receives."""

    own: list[tuple[torch.Tensor, torch.Tensor]]  # (engine tensor, view of a shard)
    sent: list[list[torch.Tensor]]  # by rank: views of this rank's shards
    received: list[list[torch.Tensor]]  # by rank: engine tensors


def fsdp_units(policy: nn.Module) -> list[tuple[FSDPModule, dict[str, str]]]:
    """Each FSDP module with its own parameters, {name in the policy: name inside the module}; the root comes last."""
    modules = dict(policy.named_modules())
    owned: dict[str, dict[str, str]] = {}
    for name, _ in policy.named_parameters():
        parts = name.split(".")
        prefixes = (".".join(parts[:k]) for k in range(len(parts) - 1, -1, -1))
        owner = next(p for p in prefixes if isinstance(modules[p], FSDPModule))
        owned.setdefault(owner, {})[name] = name.removeprefix(f"{owner}.") if owner else name
    return [(modules[owner], owned[owner]) for owner in sorted(owned, key=lambda o: (o == "", list(owned).index(o)))]


def record_plan(engine_model: nn.Module, policy: nn.Module) -> list[Unit]:
    """Feed each FSDP module's tensors to vLLM's `load_weights` once and note the copies.

    Raises: RuntimeError when a loader copies from a tensor it made itself, or leaves an engine parameter unwritten.
    """
    plan, written = [], {}
    for module, names in fsdp_units(policy):
        module.reshard()
        module.unshard()
        params = dict(module.named_parameters())
        unit = Unit(module, {inner: hf_name(name) for name, inner in names.items()}, [])
        by_storage = {params[i].untyped_storage().data_ptr(): i for i in names.values()}
        with _RecordCopies() as record:
            engine_model.load_weights(iter(unit.fed().items()))
        for destination, source in record.copies:
            inner = by_storage.get(source.untyped_storage().data_ptr())
            if inner is None:
                names = list(unit.names.values())[:3]
                raise RuntimeError(f"vLLM's loader reworks a tensor of {names}...: no in-place plan for it")
            offset = source.storage_offset() - params[inner].storage_offset()
            unit.slices.append(Slice(inner, tuple(source.size()), source.stride(), offset, destination))
        for tensor in [*(s.destination for s in unit.slices), *record.fills]:  # fills: a split vocabulary's padding
            key = tensor.untyped_storage().data_ptr()
            written[key] = written.get(key, 0) + tensor.numel()
        plan.append(unit)
        module.reshard()
    for name, param in engine_model.named_parameters():
        if written.get(param.untyped_storage().data_ptr(), 0) < param.numel():
            raise RuntimeError(f"engine parameter {name} is not (fully) written by the trainer's weights")
    return plan


def plan_exchange(units: list[Unit], dtype: torch.dtype) -> list[Bucket]:
    """Who sends what to whom: each rank's engine wants parts of every rank's shards (collective).

    FSDP modules are taken together up to BUCKET_BYTES, the same on every rank. Args: dtype: the engine's.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    buckets, filled = [], BUCKET_BYTES
    for unit in units:
        unit.module.reshard()
        params = dict(unit.module.named_parameters())
        wanted: list[list[Slice]] = [[] for _ in range(world)]
        for piece in unit.slices:
            for holder, part in by_shard(piece, params[piece.name].shape, world):
                wanted[holder].append(part)
        asked = all_gather([[(p.name, p.size, p.stride, p.offset) for p in each] for each in wanted])
        # the shards are the parameters themselves: they stay where they are while the policy lives
        shards = {name: params[name].to_local() for name in unit.names}
        nbytes = sum(params[name].numel() for name in unit.names) * dtype.itemsize
        if filled + nbytes > BUCKET_BYTES:
            buckets.append(Bucket([], [[] for _ in range(world)], [[] for _ in range(world)]))
            filled = 0
        filled += nbytes
        bucket = buckets[-1]
        bucket.own += [(part.destination, part.of(shards[part.name])) for part in wanted[rank]]
        for other in range(world):
            if other != rank:
                parts = [Slice(*place, None) for place in asked[other][rank]]
                bucket.sent[other] += [part.of(shards[part.name]) for part in parts]
                bucket.received[other] += [part.destination for part in wanted[other]]
    return buckets


@torch.no_grad()
def transfer(buckets: list[Bucket], dtype: torch.dtype, device: torch.device) -> None:
    """Write the policy's current shards into the engines of all ranks, in place (collective). Args: dtype: theirs."""
    for bucket in buckets:
        if bucket.own:
            torch._foreach_copy_(*map(list, zip(*bucket.own, strict=True)))
        if dist.get_world_size() > 1:
            _exchange(bucket, dtype, device)


def _exchange(bucket: Bucket, dtype: torch.dtype, device: torch.device) -> None:
    """Send the other ranks what their engines need of this rank's shards, cast to the engine's dtype."""
    flat = {"dtype": dtype, "device": device}
    sizes = [[sum(t.numel() for t in each) for each in side] for side in (bucket.sent, bucket.received)]
    outgoing, incoming = (torch.empty(sum(size), **flat) for size in sizes)

    def laid_out(buffer, tensors):
        parts = buffer.split([t.numel() for t in tensors])
        return [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]

    sent, received = ([t for each in side for t in each] for side in (bucket.sent, bucket.received))
    if sent:
        torch._foreach_copy_(laid_out(outgoing, sent), sent)
    dist.all_to_all_single(incoming, outgoing, sizes[1], sizes[0])
    if received:
        torch._foreach_copy_(received, laid_out(incoming, received))
