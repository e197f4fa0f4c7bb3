"""The run folder: made or entered again, with what runs written down; and the checkpoint that the run goes on from."""

import json
import math
import os
import secrets
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import distributions
from pathlib import Path

import torch.distributed as dist

from utils.checkpoint import checked_state, saved_in, step_of
from utils.dist import broadcast, fail_together
from utils.jsonl import cut_jsonl, read_jsonl
from utils.plot import plot_runs

MAY_DIFFER = {  # flags that a resumed run may change: they do not alter what was trained so far
    "run_dir", "resume", "num_steps", "num_epochs", "save_every", "keep_checkpoints", "checksums", "eval_every",
    "export_hf", "max_tokens_per_gpu", "activation_checkpointing", "compile", "offload", "dry_run", "sleep",
    "kv_cache_gib", "max_num_seqs", "tensor_parallel_size", "reward_timeout_s", "reward_workers", "record",
    "replay", "verify_sync", "hang_timeout_s", "max_reward_std", "grad_norm_bound", "min_entropy",
    "max_truncated_frac",
}  # fmt: skip


def find_checkpoint(
    run_dir: Path, resume: str, num_steps: int, parts: Sequence[str], args: dict, data: dict
) -> tuple[Path | None, int]:
    """The checkpoint that the run goes on from and its step, or None and 0 (collective). It changes nothing.

    Args: parts: names of what it must hold; args: flag values; data: fingerprints by the name of their flag.
    Raises: ValueError for a used folder without --resume, a checkpoint that is missing or another script's, or flags or
        data that may not change.
    """
    return _by_rank_0(run_dir, lambda: _find_checkpoint(run_dir, resume, num_steps, parts, args, data))


def open_run(run_dir: Path, checkpoint: Path | None, done: int, args: dict, script: str) -> None:
    """Create or re-enter the run folder and record what runs (collective).

    Writes args.json, command.txt, env.txt and code/. With a checkpoint, of step `done`, cuts metrics.jsonl,
    events.jsonl and rollouts.jsonl back to that, and renames checkpoints beyond it.
    """
    _by_rank_0(run_dir, lambda: _open_run(run_dir, checkpoint, done, args, script))


def _by_rank_0(run_dir: Path, act: Callable):
    found = None
    with fail_together():
        if dist.get_rank() == 0:
            try:
                found = act()
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


def _find_checkpoint(
    run: Path, resume: str, num_steps: int, parts: Sequence[str], args: dict, data: dict
) -> tuple[Path | None, int]:
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
        if state["parts"] != list(parts):
            rule = f"holds {' and '.join(state['parts'])}, and must hold {' and '.join(parts)}"
            raise ValueError(f"--resume {checkpoint}: {rule}; one of this script's runs works")
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
        if step > num_steps:
            raise ValueError(f"--num-steps {num_steps}: the checkpoint is at step {step} already; {step} or more")
    return checkpoint, step


def _open_run(run: Path, checkpoint: Path | None, done: int, args: dict, script: str) -> None:
    if checkpoint is not None:
        for abandoned in (p for p in saved_in(run) if step_of(p) > done):  # a later --resume auto would go on from it
            shutil.rmtree(f"{abandoned}.old", ignore_errors=True)
            abandoned.rename(f"{abandoned}.old")
    run.mkdir(parents=True, exist_ok=True)
    for name in ("metrics.jsonl", "events.jsonl", "rollouts.jsonl"):
        cut_jsonl(run / name, done if checkpoint is not None else -1)
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


def close_run(
    run_dir: Path, began: float, done: int, num_steps: int, saved: Path | None, key: str, word: str, rows: str
) -> None:
    """Draw the curves and say how the run ended: after which step, where not the last; its first and last `key`.

    Args: began: time.perf_counter() when the run did; saved: the last step's checkpoint, if there is one; word, rows:
        what the line calls the figure `key`, and what it was evaluated on.
    """
    if dist.get_rank():
        return
    if done < num_steps:
        what = "--resume auto goes on from there" if saved else "nothing was saved of it"
        print(f"{run_dir.name}: stopped by SIGTERM after step {done} of {num_steps}; {what}")
    logged = read_jsonl(run_dir / "metrics.jsonl")  # nothing, where a run that was done was exported elsewhere
    curves, change = plot_runs([run_dir], run_dir / "curves.png") if logged else "none", ""
    if evals := [row for row in logged if any(name.startswith("eval/") for name in row)]:
        first, final = (row.get(key, math.nan) for row in (evals[0], evals[-1]))
        low, high = (evals[-1].get(f"{key}_{end}") for end in ("low", "high"))
        interval = "" if low is None else f" ({low:.2f} to {high:.2f})"
        change = f"{word} {first:.2f} -> {final:.2f}{interval} on {rows}, "
    print(f"{run_dir.name}: {change}{time.perf_counter() - began:.0f} s; curves: {curves}")
