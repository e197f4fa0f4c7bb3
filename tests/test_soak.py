"""A long run holds no more memory, files or threads at its end than after its first steps."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import pytest
from conftest import ROOT, user_env

from utils.jsonl import read_jsonl

STEPS, WARM = 500, 100


def holdings(pid: int) -> dict[str, int]:
    """Resident memory in MiB, open files, threads and children of a process."""
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    children = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return {
        "MiB": int(status["VmRSS"].split()[0]) // 1024,
        "files": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": int(status["Threads"]),
        "children": sum(map(len, children)),
    }


@pytest.mark.slow
def test_memory_files_and_threads_are_level_after_warm_up(tmp_path):
    """Of the embedded task with vLLM; an evaluation and a checkpoint now and then."""
    command = [
        sys.executable, ROOT / "grpo_fsdp.py", "--run-dir", tmp_path / "run", "--num-steps", STEPS, "--seed", 1,
        "--prompts-per-step", 4, "--group-size", 4, "--minibatch-size", 16, "--eval-every", 100, "--save-every", 50,
        "--keep-checkpoints", 2, "--kl-coef", 0.01, "--export-hf", "every",
    ]  # fmt: skip
    log = (tmp_path / "log").open("w")
    process = subprocess.Popen(
        map(str, command), cwd=ROOT, env=user_env(OMP_NUM_THREADS="1"), stdout=log, stderr=log, start_new_session=True
    )
    seen: dict[int, dict[str, int]] = {}  # by step
    try:
        metrics = tmp_path / "run/metrics.jsonl"
        while process.poll() is None:
            step = max([row["step"] for row in read_jsonl(metrics)], default=0)
            if 0 < step < STEPS and step // 10 not in {done // 10 for done in seen}:  # once in ten, which may be fast
                seen[step] = holdings(process.pid)
            time.sleep(0.1)
        assert process.returncode == 0, (tmp_path / "log").read_text()[-3000:]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    for step in sorted(seen)[:: len(seen) // 10]:
        print(step, seen[step])
    warm = [held for step, held in seen.items() if WARM <= step < WARM + 100]
    late = [held for step, held in seen.items() if step >= STEPS - 100]
    assert len(warm) >= 5 and len(late) >= 5, sorted(seen)
    for what, room in (("MiB", 20), ("files", 0), ("threads", 0), ("children", 0)):  # medians: some are in a save
        first, last = (median(held[what] for held in part) for part in (warm, late))
        assert last - first <= room, f"{what}: {first} around step {WARM + 50}, {last} around step {STEPS - 50}"
