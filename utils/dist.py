"""Process group, device, seeds, and sums over ranks. Every rank runs the same script (SPMD)."""

import atexit
import gc
import hashlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def seed_for(*parts: int | str) -> int:
    """A 63-bit non-negative seed that depends on `parts` alone: not on rank, world size, process or call order.

    Everything random here (samples, data order, minibatches) draws from a generator seeded by this, so a checkpoint
    needs no RNG state.
    """
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def init_distributed() -> torch.device:
    """Join the process group that torchrun describes, or make one of a single rank; returns this rank's device."""
    if "RANK" not in os.environ:  # plain `python script.py`: the same code path with a world of one
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    atexit.register(_let_go)
    return device


def _let_go() -> None:
    """What still holds the group once it is destroyed (meshes, sharded modules, in cycles) goes before the interpreter
    does: a gloo thread that lets go of a tensor after that aborts the process.
    """
    gc.collect()
    time.sleep(0.1)  # for one that is late: it needs the interpreter's lock, and on a full machine its turn


_asked_to_stop: list[bool] = []


def finish_on_sigterm() -> None:
    """From now on the first SIGTERM only asks to stop (`asked_to_stop`); a second one ends the process as ever."""
    rank = os.getpid()

    def ask(*_) -> None:
        _asked_to_stop.append(True)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if os.getpid() != rank:  # a process forked from it (a pool's worker): whoever ends one waits for its end
            os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, ask)


def asked_to_stop() -> bool:
    """Whether any rank has been sent SIGTERM, as torchrun and schedulers do before they kill (collective)."""
    return any(all_gather(bool(_asked_to_stop)))


def world_mesh(device: torch.device) -> DeviceMesh:
    """One FSDP dimension over all ranks."""
    return init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("fsdp",))


def all_gather(value: Any) -> list[Any]:
    """`value` of every rank, in rank order. Any picklable object; for small host data, not for tensors."""
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def broadcast(value: Any) -> Any:
    """Rank 0's `value`, on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def sum_over_ranks(value: torch.Tensor) -> torch.Tensor:
    """The sum of every rank's `value`, in float64."""
    total = value.detach().double()  # a copy: all_reduce works in place
    total = total.clone() if total is value else total
    dist.all_reduce(total)
    return total


def stop(message: str) -> None:
    """End the run with one line; called on every rank at once. Checkpoints stay as they are."""
    raise SystemExit(f"error: {message}" if dist.get_rank() == 0 else 1)


@contextmanager
def fail_together() -> Iterator[None]:
    """Around checks that one rank may fail alone (a file missing on one node): the error is raised on every rank.

    Else the others would wait in the next collective for a rank that has stopped. Raises: ValueError.
    """
    error = None
    try:
        yield
    except (ValueError, OSError) as caught:
        error = str(caught)
    errors = [e for e in all_gather(error) if e is not None]
    if errors:
        raise ValueError(errors[0])


@contextmanager
def one_line_errors() -> Iterator[None]:
    """A ValueError, the user's mistake and the same on every rank (see fail_together), ends the run with its line."""
    try:
        yield
    except ValueError as error:
        dist.destroy_process_group()
        raise SystemExit(f"error: {error}" if int(os.environ["RANK"]) == 0 else 1) from None
