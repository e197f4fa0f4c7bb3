"""What only several GPUs show. On a machine with two or more: python -m pytest tests/test_multi_gpu.py

Runs on recorded rollouts are compared in float32 (tight) and bfloat16 (its rounding); the engine runs in bfloat16.
"""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from conftest import ROOT, torchrun, user_env
from safetensors.numpy import load_file
from test_runs import LR, UPDATES, command, rows, same_run, weights

from utils import tiny

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A random tiny model and its data."""
    folder = tmp_path_factory.mktemp("gpus")
    tiny.make_model(folder / "model", seed=3, num_sft_steps=0)
    tiny.make_data(folder / "data")
    return folder


@pytest.fixture(scope="module")
def folder(files):
    """Live runs on one and on two GPUs, one of them recorded; then replays of it; then replays that are resumed.

    All of a kind at once: they are small.
    """
    live = ["--verify-sync", 1, "--save-every", 0]
    replay = ["--replay", files / "rollouts", "--save-every", 2, "--dtype"]
    float32 = [*replay, "float32", "--resume"]
    stages = [
        [
            ("one", 1, *live, "--record", files / "rollouts"),
            ("again", 1, *live),
            ("two", 2, *live),
            ("tensor", 2, *live, "--tensor-parallel-size", 2),
        ],
        [(f"{n}_{dtype}", k, *replay, dtype) for dtype in ("float32", "bfloat16") for n, k in (("one", 1), ("two", 2))],
        [
            ("resumed_on_1", 1, *float32, files / "two_float32/checkpoints/step_2"),
            ("resumed_on_2", 2, *float32, files / "one_float32/checkpoints/step_2"),
        ],
    ]
    for stage in stages:
        with ThreadPoolExecutor() as pool:
            jobs = []
            for i, (name, ranks, *flags) in enumerate(stage):
                gpus = "0,1" if ranks == 2 else str(i % 2)
                jobs.append(pool.submit(torchrun, ranks, *command(files, name), *flags, CUDA_VISIBLE_DEVICES=gpus))
            [job.result() for job in jobs]
    return files


def test_float32_updates_on_two_gpus_are_those_on_one(folder):
    same_run(folder / "two_float32", folder / "one_float32")


def test_bfloat16_updates_on_two_gpus_are_those_on_one_within_rounding(folder):
    """Losses, gradient norms and weights; Adam turns the rounding of small gradients into whole steps of some."""
    for mine, other in zip(rows(folder / "two_bfloat16"), rows(folder / "one_bfloat16"), strict=True):
        for key in ("policy/entropy", "optim/grad_norm", "reward/score", "rollout/response_len"):
            assert mine[key] == pytest.approx(other[key], rel=0.02), (other["step"], key)
        assert mine["policy/loss"] == pytest.approx(other["policy/loss"], abs=2e-3), other["step"]
    mine, other = weights(folder / "two_bfloat16"), weights(folder / "one_bfloat16")
    start = weights_of_the_start(folder)
    moved = np.concatenate([(other[name] - start[name]).ravel() for name in other])
    apart = np.concatenate([(mine[name] - other[name]).ravel() for name in other])
    assert np.abs(apart).max() <= 2 * LR * UPDATES
    assert np.abs(apart).mean() < 0.1 * np.abs(moved).mean()


def weights_of_the_start(folder):
    return load_file(folder / "model/model.safetensors")


@pytest.mark.parametrize("name", ["again", "two", "tensor"])
def test_the_first_step_of_a_live_run_does_not_depend_on_the_gpus(folder, name):
    """Every sync of it proven (--verify-sync 1). Samples part where rounding tips one: a few of 32 responses."""
    mine, other = (rows(folder / run)[1] for run in (name, "one"))
    assert mine["rollout/logprob_diff_mean"] < 0.02
    for key in ("rollout/response_len", "policy/entropy", "optim/grad_norm"):
        assert mine[key] == pytest.approx(other[key], rel=0.1), key
    evaluated = [rows(folder / run)[0]["eval/score"] for run in (name, "one")]  # greedy, 200 prompts
    assert evaluated[0] == pytest.approx(evaluated[1], rel=0.05)


@pytest.mark.parametrize("name", ["resumed_on_1", "resumed_on_2"])
def test_resumed_on_another_number_of_gpus(folder, name):
    last = [rows(folder / run)[-1] for run in (name, "one_float32")]
    figures = [{k: v for k, v in row.items() if not k.startswith(("time/", "perf/", "mem/"))} for row in last]
    assert figures[0] == {k: pytest.approx(v, rel=2e-4, abs=2e-5) for k, v in figures[1].items()}
    mine, other = weights(folder / name), weights(folder / "one_float32")
    apart = np.concatenate([np.abs(mine[key] - other[key]).ravel() for key in other])
    assert apart.max() <= 0.1 * LR * UPDATES and apart.mean() < 1e-2 * LR


def test_a_killed_rank_ends_the_run_and_the_relaunch_goes_on(files):
    """An unclean kill (SIGKILL) of one rank in the middle of a tensor-parallel run."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    flags = ["--save-every", 1, "--tensor-parallel-size", 2, "--num-steps", 400, "--eval-every", 0, "--resume", "auto"]
    line = [str(part) for part in (*launcher, *command(files, "killed"), *flags)]
    env, log = user_env(OMP_NUM_THREADS="1", TEST_RUN=str(files)), (files / "killed.log").open("a")

    def steps(process, number):
        metrics = files / "killed/metrics.jsonl"
        while not (metrics.exists() and f'"step": {number},' in metrics.read_text()):
            assert process.poll() is None, (files / "killed.log").read_text()[-3000:]
            time.sleep(0.05)

    process = subprocess.Popen(line, cwd=ROOT, env=env, stdout=log, stderr=log)
    steps(process, 3)
    os.kill(rank_processes(files)[1], signal.SIGKILL)
    began = time.monotonic()
    assert process.wait(timeout=60) != 0
    print(f"ended {time.monotonic() - began:.1f} s after the kill")
    assert not rank_processes(files)
    done = rows(files / "killed")[-1]["step"]
    process = subprocess.Popen(line, cwd=ROOT, env=env, stdout=log, stderr=log)
    steps(process, done + 2)
    process.terminate()
    process.wait(timeout=60)


def rank_processes(folder) -> dict[int, int]:
    """Process of each rank of the run that was started with this folder in its environment."""
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ") as file:
                env = dict(pair.split("=", 1) for pair in file.read().split("\0") if "=" in pair)
            with open(f"/proc/{pid}/cmdline") as file:
                script = "grpo_fsdp.py" in file.read()
        except OSError:
            continue
        if env.get("TEST_RUN") == str(folder) and "RANK" in env and script:
            found.setdefault(int(env["RANK"]), int(pid))
    return found


def test_the_recorded_rollouts_are_all_there(folder):
    assert all(len(pq.read_table(folder / f"rollouts/step_{step}.parquet")) == 32 for step in (1, 2, 3))
