"""Runs that are killed or told to stop at any moment, and gone on with, end as the straight run does, bit for bit."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, run, user_env
from safetensors.numpy import load_file
from test_golden import GOLDEN, SCRIPTS
from test_runs import rows

from utils import tiny
from utils.tiny_pairs import make_pairs

STEPS = 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("survive")
    tiny.make_model(folder / "model", seed=11, num_sft_steps=0)
    tiny.make_data(folder / "data")
    make_pairs(folder / "data")
    return folder


@pytest.fixture(autouse=True)
def nothing_is_left(folder):
    """Ranks are in sessions of their own, and a test that fails may have stopped them."""
    yield
    for pid in os.listdir("/proc"):
        if str(environment(pid).get("TEST_RUN")).startswith(str(folder)):
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(int(pid), signal.SIGKILL)


def start(folder, script, name, *more, ranks=1) -> subprocess.Popen:
    """A run on recorded rollouts that saves every step, in a process group of its own."""
    policy = script != "reward_model_bt"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks] if ranks > 1 else []
    command = [
        sys.executable, *launcher, ROOT / f"{script}.py", "--run-dir", folder / name, "--model", folder / "model",
        "--train-files", folder / f"data/{'train' if policy else 'train_pairs'}.parquet", "--num-steps", STEPS,
        "--lr", 3e-4, "--max-prompt-len", 16, "--max-response-len", 12, "--save-every", 1, "--keep-checkpoints", 2,
        *SCRIPTS[script], *(["--replay", GOLDEN / "rollouts"] if policy else []), *more,
    ]  # fmt: skip
    env = user_env(OMP_NUM_THREADS="1", TEST_RUN=str(folder / name), TORCH_ELASTIC_SHUTDOWN_TIMEOUT="600")
    log = (folder / f"{name}.log").open("a")
    return subprocess.Popen(map(str, command), cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True)


def finish(folder, process, name):
    assert process.wait(timeout=300) == 0, (folder / f"{name}.log").read_text()[-3000:]


def wait_for(folder, name, step, process) -> None:
    """Until the run has logged `step`, or has ended."""
    log = folder / name / "metrics.jsonl"
    while process.poll() is None and not (log.exists() and f'"step": {step},' in log.read_text()):
        time.sleep(0.02)


def same_end(folder, name, straight):
    for a, b in zip(rows(folder / name), rows(folder / straight), strict=True):
        figures = [{k: v for k, v in row.items() if not k.startswith(("time/", "perf/"))} for row in (a, b)]
        assert figures[0] == figures[1]
    mine, other = (load_file(folder / run / "hf/model.safetensors") for run in (name, straight))
    assert all(np.array_equal(mine[key], other[key]) for key in other)


@pytest.fixture(scope="module")
def straight(folder):
    """Of each script and number of ranks, once."""

    @cache
    def get(script, ranks=1):
        name = f"straight_{script}_{ranks}"
        finish(folder, start(folder, script, name, ranks=ranks), name)
        return name

    return get


@pytest.mark.parametrize("script, kills", [
    ("ppo_fsdp", 4), pytest.param("grpo_fsdp", 20, marks=pytest.mark.slow),
    pytest.param("reward_model_bt", 20, marks=pytest.mark.slow),
])  # fmt: skip
def test_killed_at_random_times_and_resumed(folder, straight, script, kills):
    generator, name = np.random.default_rng(kills), f"killed_{script}"
    for _ in range(kills):
        process = start(folder, script, name, "--resume", "auto")
        reached = max([row["step"] for row in rows(folder / name)], default=0) if (folder / name).exists() else 0
        wait_for(folder, name, min(reached + 1, STEPS - 1), process)
        time.sleep(generator.uniform(0, 0.5))  # a step takes about that long, a good part of it the save
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if (folder / name / "hf").exists():  # it got to the end: once more from the start
            (folder / name).rename(folder / f"{name}_{time.time()}")
    finish(folder, start(folder, script, name, "--resume", "auto"), name)
    same_end(folder, name, straight(script))


def test_a_rank_that_hangs_ends_the_run_with_what_it_was_at(folder, straight):
    name = "hung"
    process = start(folder, "grpo_fsdp", name, "--hang-timeout-s", 5, ranks=2)
    wait_for(folder, name, 2, process)
    ranks = [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and environment(pid).get("RANK") == "1"]
    mine = [pid for pid in ranks if environment(pid).get("TEST_RUN") == str(folder / name)]
    os.kill(mine[0], signal.SIGSTOP)
    log, began = folder / f"{name}.log", time.monotonic()
    while "no sign of life" not in log.read_text() and time.monotonic() - began < 60:
        time.sleep(0.1)
    assert re.search(
        r"error: rank 1 has shown no sign of life for 5 s; rank 1 was last at: step \d+, ", log.read_text()
    )
    os.kill(mine[0], signal.SIGKILL)  # torchrun would, half a minute later
    assert process.wait(timeout=60) == 1
    assert not any(environment(pid).get("TEST_RUN") == str(folder / name) for pid in os.listdir("/proc"))
    finish(folder, start(folder, "grpo_fsdp", name, "--resume", "auto"), name)
    assert [row["step"] for row in rows(folder / name)] == list(range(1, STEPS + 1))


def test_a_launcher_that_hangs_ends_the_run(folder):
    """Its store gives no answer then, and no error: as where the first machine of several is frozen, or gone.

    Whether the ranks still train by then, or are at their end already.
    """
    name = "launcher_hung"
    process = start(folder, "grpo_fsdp", name, "--hang-timeout-s", 4, ranks=2)
    wait_for(folder, name, 2, process)
    os.kill(process.pid, signal.SIGSTOP)
    log, began = folder / f"{name}.log", time.monotonic()
    while "the launcher's host" not in log.read_text() and time.monotonic() - began < 60:
        time.sleep(0.1)
    assert re.search(
        r"error: the launcher's host, \S+, has shown no sign of life for 4 s; rank [01] was", log.read_text()
    )
    os.kill(process.pid, signal.SIGCONT)
    assert process.wait(timeout=60) == 1
    assert not any(ours(pid, folder / name) for pid in os.listdir("/proc"))


def test_a_run_that_is_paused_as_a_whole_goes_on(folder, straight):
    """As a suspended machine or job does: every rank, and the launcher, for longer than the limit."""
    name = "paused"
    process = start(folder, "grpo_fsdp", name, "--hang-timeout-s", 4, ranks=2)
    wait_for(folder, name, 2, process)
    everyone = [int(pid) for pid in os.listdir("/proc") if ours(pid, folder / name)]
    one = {pid for pid in everyone if environment(pid).get("RANK") == "1"}
    for order, what in ((one, signal.SIGSTOP), (set(everyone) - one, signal.SIGSTOP)):  # not all at once
        [os.kill(pid, what) for pid in order]
        time.sleep(0.5)
    time.sleep(6)
    for order, what in ((set(everyone) - one, signal.SIGCONT), (one, signal.SIGCONT)):
        [os.kill(pid, what) for pid in order]
        time.sleep(0.5)
    finish(folder, process, name)
    same_end(folder, name, straight("grpo_fsdp", 2))


@pytest.mark.slow
def test_a_rank_that_hangs_in_vllm_ends_the_run_and_the_port_is_free_again(folder):
    """The other one spins in the collectives of vLLM's CPU backend, which know no limit, and leave shared memory."""
    port, run_dir = free_port(), folder / "hung_in_vllm"
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", 2, "--master-port", port]
    command = [
        sys.executable, *launcher, ROOT / "grpo_fsdp.py", "--run-dir", run_dir, "--model", folder / "model",
        "--train-files", folder / "data/train.parquet", "--reward", f"{ROOT}/tests/dense_reward.py:dense",
        "--prompts-per-step", 4, "--group-size", 4, "--max-prompt-len", 16, "--max-response-len", 12, "--max-num-seqs",
        16, "--kv-cache-gib", 0.125, "--tensor-parallel-size", 2, "--hang-timeout-s", 5, "--save-every", 1,
        "--resume", "auto",
    ]  # fmt: skip
    log = (folder / "hung_in_vllm.log").open("a")

    def begin(steps):
        line = [*map(str, [*command, "--num-steps", steps])]
        env = user_env(OMP_NUM_THREADS="1", TEST_RUN=str(run_dir))
        return subprocess.Popen(line, cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True)

    process = begin(1000)
    wait_for(folder, "hung_in_vllm", 3, process)
    mine = [p for p in os.listdir("/proc") if ours(p, run_dir) and environment(p).get("RANK") == "1"]
    scripts = [p for p in mine if b"grpo_fsdp.py" in Path(f"/proc/{p}/cmdline").read_bytes()]  # not its reward workers
    os.kill(int(scripts[0]), signal.SIGSTOP)
    began = time.monotonic()
    assert process.wait(timeout=60) == 1
    assert "rank 1 has shown no sign of life for 5 s" in (folder / "hung_in_vllm.log").read_text()
    assert time.monotonic() - began < 60 and not any(ours(p, run_dir) for p in os.listdir("/proc"))
    done = rows(run_dir)[-1]["step"]
    process = begin(done + 2)
    assert process.wait(timeout=120) == 0, (folder / "hung_in_vllm.log").read_text()[-3000:]
    assert [row["step"] for row in rows(run_dir)] == list(range(1, done + 3))
    assert not list(Path("/dev/shm").glob(f"{port}-*"))


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def ours(pid: str, run_dir) -> bool:
    return environment(pid).get("TEST_RUN") == str(run_dir)


def environment(pid: str | int) -> dict[str, str]:
    """Of a process, as it was started; empty where it is not ours, or is over."""
    try:
        pairs = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def test_a_run_that_is_done_exports_again(folder, straight):
    name = straight("grpo_fsdp")
    exported = (folder / name / "hf").rename(folder / "exported")
    finish(folder, start(folder, "grpo_fsdp", name, "--resume", "auto"), name)
    assert [row["step"] for row in rows(folder / name)] == list(range(1, STEPS + 1))
    mine, other = (load_file(run / "model.safetensors") for run in (folder / name / "hf", exported))
    assert all(np.array_equal(mine[key], other[key]) for key in other)


@pytest.mark.parametrize("script", ["grpo_fsdp", "reward_model_bt"])
def test_sigterm_finishes_the_step_saves_and_ends(folder, straight, script):
    name = f"stopped_{script}"
    process = start(folder, script, name, "--save-every", 1000)
    wait_for(folder, name, 3, process)
    process.terminate()
    finish(folder, process, name)
    last = rows(folder / name)[-1]["step"]
    assert 3 <= last < STEPS and not (folder / name / "hf").exists()
    assert [p.name for p in (folder / name / "checkpoints").iterdir()] == [f"step_{last}"]
    assert f"stopped by SIGTERM after step {last} of {STEPS}; --resume auto" in (folder / f"{name}.log").read_text()
    finish(folder, start(folder, script, name, "--resume", "auto"), name)
    same_end(folder, name, straight(script))


def test_sigterm_to_torchrun_finishes_the_step_on_every_rank(folder, straight):
    """torchrun hands the signal on, once, and then waits for them."""
    name = "stopped_ranks"
    process = start(folder, "grpo_fsdp", name, "--save-every", 1000, ranks=2)
    wait_for(folder, name, 3, process)
    process.terminate()
    assert process.wait(timeout=120) != 0  # torchrun's own word for having been stopped
    last = rows(folder / name)[-1]["step"]
    assert 3 <= last < STEPS and not (folder / name / "hf").exists()
    assert [p.name for p in (folder / name / "checkpoints").iterdir()] == [f"step_{last}"]
    log = (folder / f"{name}.log").read_text()
    assert log.count(f"stopped by SIGTERM after step {last} of {STEPS}; --resume auto") == 1, log[-3000:]
    assert "ChildFailedError" not in log and "SIGKILL" not in log, log[-3000:]
    finish(folder, start(folder, "grpo_fsdp", name, "--resume", "auto", ranks=2), name)
    same_end(folder, name, straight("grpo_fsdp", 2))


def test_sigterm_ends_what_a_rank_has_forked():
    """Else a pool that ends its workers would wait for one that only notes the signal."""
    script = """
import os, signal, time
from utils.dist import finish_on_sigterm
finish_on_sigterm()
ready, say = os.pipe()
if (pid := os.fork()) == 0:
    os.write(say, b"x")
    time.sleep(20)
    os._exit(0)
os.read(ready, 1)
os.kill(pid, signal.SIGTERM)
assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGTERM
os.kill(os.getpid(), signal.SIGTERM)
print("asked")
"""
    assert run([sys.executable, "-c", script]).stdout == "asked\n"
