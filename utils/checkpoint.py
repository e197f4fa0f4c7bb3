"""Sharded checkpoints to resume from.

A checkpoint is `checkpoints/step_N/`: torch.distributed.checkpoint shards of models and optimizers, and `state.json`,
which also lists the shards with their sizes. Samples, data order and learning rate are functions of (seed, step), so
that is all the state there is. It is written aside and renamed whole: a folder named step_N is complete, and one whose
files have changed since is refused. DCP's metadata is a pickle: load only checkpoints you made.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict

from utils.dist import all_gather, broadcast
from utils.optim import Parts


def step_of(folder: Path) -> int:
    """N of a whole checkpoint's folder step_N, else -1 (one being written, or left behind by a resume)."""
    number = folder.name.removeprefix("step_")
    return int(number) if number.isdigit() else -1


def saved_in(run_dir: Path) -> list[Path]:
    """The whole checkpoints of a run, the newest last."""
    return sorted((p for p in run_dir.glob("checkpoints/step_*") if step_of(p) >= 0), key=step_of)


def damage_of(folder: Path) -> str:
    """What is not as it was written in a checkpoint; empty where all is."""
    try:
        state = json.loads((folder / "state.json").read_text())
        if lacking := {"step", "args", "data", "parts", "files"} - state.keys():
            return f"its state.json lacks {sorted(lacking)[0]}"
        files = [(name, size, digest) for name, (size, digest) in state["files"].items()]
    except (ValueError, TypeError, AttributeError, OSError) as error:  # not JSON, or JSON of another shape
        return f"its state.json does not read ({error})"
    for name, size, digest in files:
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, and was written with {size}"
        if digest and _digest(path) != digest:
            return f"{name} has another checksum than when it was written"
    return ""


def checked_state(checkpoint: Path, saved: list[Path]) -> dict:
    """The checkpoint's state, if its files are what was written. Raises: ValueError, naming one of `saved` that is."""
    if found := damage_of(checkpoint):
        whole = [p for p in reversed(saved) if p.resolve() != checkpoint.resolve() and not damage_of(p)]
        works = f"--resume {whole[0]} works" if whole else "no other checkpoint of the run is whole: start a new one"
        raise ValueError(f"--resume: {checkpoint} is damaged, {found}; {works}")
    return json.loads((checkpoint / "state.json").read_text())


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def save_checkpoint(
    run_dir: Path,
    step: int,
    parts: Parts,
    args: dict,
    data: dict,
    state: dict | None = None,
) -> Path | None:
    """Write checkpoints/step_N (collective); None where it could not be written (a full disk), which is said.

    Earlier checkpoints stay as they are until the new one is whole; then all but the newest --keep-checkpoints go.
    Args: state: what else a step hands to the next one (a factor on the learning rates), as JSON.
    """
    final = run_dir / "checkpoints" / f"step_{step}"
    aside = final.with_name(f"{final.name}.tmp")
    error = ""
    try:
        if dist.get_rank() == 0:
            for left_behind in final.parent.glob("*.tmp"):
                shutil.rmtree(left_behind)
            aside.mkdir(parents=True)
    except OSError as caught:
        error = str(caught)
    try:
        if not (error := broadcast(error)):
            dcp.save(_state_of(parts), checkpoint_id=aside)
            if dist.get_rank() == 0:
                record = {
                    "step": step,
                    "args": args,
                    "data": data,
                    "parts": list(parts),
                    "state": state or {},
                    "world_size": dist.get_world_size(),
                    "torch": torch.__version__,
                    "files": {
                        str(path.relative_to(aside)): (path.stat().st_size, _digest(path) if args["checksums"] else "")
                        for path in sorted(aside.rglob("*"))
                        if path.is_file()
                    },
                }
                with (aside / "state.json").open("w") as file:
                    file.write(json.dumps(record, indent=2) + "\n")
                    file.flush()
                    os.fsync(file.fileno())
    except (OSError, CheckpointException) as caught:  # the latter on every rank, where one could not write
        error = str(caught).strip().splitlines()[-1]
    failed = [e for e in all_gather(error) if e]
    if dist.get_rank() == 0:
        saved = saved_in(run_dir)
        if failed:
            shutil.rmtree(aside, ignore_errors=True)
            free, newest = shutil.disk_usage(run_dir).free / 2**30, saved[-1] if saved else "none"
            print(
                f"checkpoint of step {step}: NOT WRITTEN ({failed[0]}; {free:.1f} GiB are free there); "
                f"the run goes on, the newest whole one is {newest}",
                flush=True,
            )
        else:
            shutil.rmtree(final, ignore_errors=True)
            os.replace(aside, final)
            others = [p for p in saved if step_of(p) < step]
            too_many = len(others) + 1 - (args["keep_checkpoints"] or len(others) + 1)
            for old in others[: max(0, too_many)]:
                gone = old.with_name(f"{old.name}.tmp")  # under its own name it would be a checkpoint until all is gone
                os.replace(old, gone)
                shutil.rmtree(gone)
    dist.barrier()
    return None if failed else final


def load_checkpoint(checkpoint: Path, parts: Parts) -> dict:
    """Fill models and optimizers from a checkpoint, on any number of ranks (collective); returns its `state`."""
    # in place: these are the models' and the optimizers' own tensors, wherever they live, and rates are set every step
    dcp.load(_state_of(parts), checkpoint_id=checkpoint)
    return json.loads((checkpoint / "state.json").read_text())["state"]


def _state_of(parts: Parts) -> dict:
    full = {}
    for name, (model, optimizer) in parts.items():
        if not optimizer.state:  # torch then fills it by a step with zero gradients, which must not count as one
            get_state_dict(model, optimizer)
            for state in optimizer.state.values():
                state["step"].zero_()
        full[name] = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    return full
