"""The run folder: made or entered again, with what runs written down; and the checkpoint that the run goes on from."""

import json
import os
import secrets
import shlex
import shutil
import sys
from importlib.metadata import distributions
from pathlib import Path

import torch.distributed as dist

from utils.checkpoint import checked_state, saved_in, step_of
from utils.dist import broadcast, fail_together
from utils.jsonl import cut_jsonl

MAY_DIFFER = {  # flags that a resumed run may change: they do not alter what was trained so far
    "run_dir", "resume", "num_steps", "num_epochs", "save_every", "keep_checkpoints", "checksums", "eval_every",
    "export_hf", "max_tokens_per_gpu", "activation_checkpointing", "compile", "offload", "dry_run", "sleep",
    "kv_cache_gib", "max_num_seqs", "tensor_parallel_size", "reward_timeout_s", "reward_workers", "record",
    "replay", "verify_sync", "hang_timeout_s", "max_reward_std", "grad_norm_bound", "min_entropy",
    "max_truncated_frac",
}  # fmt: skip


def open_run(run_dir: Path, resume: str, args: dict, data: dict, script: str) -> tuple[Path | None, int]:
    """Create or re-enter the run folder and record what runs; returns the checkpoint to resume from, and its step.

    Writes args.json, command.txt, env.txt and code/. On resume cuts metrics.jsonl, events.jsonl and rollouts.jsonl back
    to the step, and renames checkpoints beyond it.
    Args: args: flag values; data: fingerprints by the name of their flag.
    Raises: ValueError for a used folder without --resume, a missing checkpoint, or flags or data that may not change.
    """
    found = None, 0
    with fail_together():
        if dist.get_rank() == 0:
            try:
                found = _open_run(run_dir, resume, args, data, script)
            except OSError as error:
                raise ValueError(f"--run-dir {run_dir}: cannot be written ({error}); give a folder of yours") from error
    return broadcast(found)


def run_id(run: Path) -> str:
    """What tells the run in this folder from all others; "none" where there is no run yet."""
    file = run / "run_id"
    return file.read_text() if file.exists() else "none"


def _write_whole(file: Path, text: str) -> None:
    """All of it or, where the disk is full, nothing."""
    aside = file.with_name(f"{file.name}.part")
    aside.write_text(text)
    os.replace(aside, file)


def _began_from(run: Path) -> Path | None:
    """Another run's checkpoint that this one went on from, before it has one of its own."""
    file = run / "args.json"
    try:
        named = json.loads(file.read_text()).get("resume", "") if file.exists() else ""
    except ValueError as error:
        raise ValueError(f"--resume auto: {file} does not read ({error}); start a new run in a new folder") from error
    if named in ("", "auto"):
        return None
    if not (Path(named) / "state.json").exists():
        raise ValueError(f"--resume auto: {run} began from {named}, which is gone; start a new run in a new folder")
    return Path(named)


def _open_run(run: Path, resume: str, args: dict, data: dict, script: str) -> tuple[Path | None, int]:
    checkpoint, step = None, 0
    saved = saved_in(run)
    if resume == "auto":
        checkpoint = saved[-1] if saved else _began_from(run)
    elif resume:
        checkpoint = Path(resume)
        if not (checkpoint / "state.json").exists():
            raise ValueError(
                f"--resume {resume}: must be a checkpoint folder; runs/x/checkpoints/step_10 works, or auto"
            )
        if (run / "metrics.jsonl").exists() and run.resolve() not in checkpoint.resolve().parents:
            raise ValueError(
                f"--run-dir {run}: holds another run than the one resumed; use a new folder, or --resume auto"
            )
    elif (run / "metrics.jsonl").exists():
        raise ValueError(f"--run-dir {run}: holds an earlier run; use --resume auto to continue it, or a new folder")
    if checkpoint is not None:
        state = checked_state(checkpoint, saved)
        step = state["step"]
        # a cosine schedule is laid out over all its steps: another number would bend it
        may_differ = MAY_DIFFER - ({"num_steps", "num_epochs"} if args.get("lr_schedule") == "cosine" else set())
        changed = [k for k, v in state["args"].items() if k in args and args[k] != v and k not in may_differ]
        if changed:
            k = changed[0]
            raise ValueError(
                f"--{k.replace('_', '-')} {args[k]}: differs from the resumed run's {state['args'][k]}; "
                "use the same value, or start a new run"
            )
        for name, fingerprint in data.items():
            if state["data"].get(name, fingerprint) != fingerprint:  # a replay records no held-out rows
                rule = "holds other rows than the resumed run's; use the same files, or start a new run"
                raise ValueError(f"--{name} {args[name.replace('-', '_')]}: {rule}")
        for abandoned in (p for p in saved if step_of(p) > step):  # else a later --resume auto would go on from it
            shutil.rmtree(f"{abandoned}.old", ignore_errors=True)
            abandoned.rename(f"{abandoned}.old")
    run.mkdir(parents=True, exist_ok=True)
    for name in ("metrics.jsonl", "events.jsonl", "rollouts.jsonl"):
        cut_jsonl(run / name, step if checkpoint is not None else -1)
    start = checkpoint.resolve() if checkpoint is not None else run.resolve()
    began = {} if start.is_relative_to(run.resolve()) else {"resume": str(start)}
    _write_whole(run / "args.json", json.dumps(args | began, indent=2) + "\n")
    if run_id(run) == "none":
        _write_whole(run / "run_id", secrets.token_hex(8))
    with (run / "command.txt").open("a") as file:
        file.write(f"WORLD_SIZE={dist.get_world_size()} {shlex.join(sys.argv)}\n")
    packages = sorted({f"{package.name}=={package.version}" for package in distributions()})
    (run / "env.txt").write_text("\n".join([f"python=={sys.version}", *packages]) + "\n")
    root = Path(script).resolve().parent
    code = [Path(script).resolve(), root / "hybrid_engine.py", *sorted((root / "utils").glob("*.py"))]
    for source in code:
        target = run / "code" / source.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    return checkpoint, step
