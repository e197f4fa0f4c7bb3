"""Killable worker processes that run reward functions: a hung, crashing or printing one cannot hurt the trainer.

Imports only the standard library and utils/rewards.py, so that a worker starts in no time.
"""

import atexit
import contextlib
import ctypes
import dataclasses
import json
import math
import os
import queue
import resource
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path

from utils.rewards import describe, load_reward, parse_rewards

TIMEOUTS_IN_A_ROW = 8  # per worker; then nothing is called any more, and the trainer sees a step without a score
MEMORY_GIB = 8  # that a worker, and each process it starts, may fill; beyond it a call gets MemoryError
MARK = "RESHARD_REWARD_WORKER"  # in the environment of a worker, and of all that it starts
START_LIMIT_S = 60.0  # a worker's start runs the imports of the user's file, which may be slow (sympy, torch)

# ---- the worker's side ----


@dataclasses.dataclass(frozen=True)
class Score:
    """What the pool says of one response; `error` is None, or why there is no number (the value is then 0)."""

    value: float
    error: str | None = None  # unjudged, timeout, exception, nonfinite, died, type
    message: str = ""


def _judge(rewards: list, response: str, row: dict) -> Score:
    """The weighted sum of `rewards`, a list of (name, weight, function), or the error of the first that has one."""
    # DETAIL: a response that could not be scored keeps no part of the sum, because half a sum is a number of another
    # scale. `error` tells the trainer, which leaves it out of its group.
    total = 0.0
    for name, weight, function in rewards:
        try:
            result = function(response, row)
        except BaseException as error:  # SystemExit and KeyboardInterrupt too: reported as this response's error
            return Score(0.0, "exception", f"{name}: {describe(error)}")
        if result is None:
            return Score(0.0, "unjudged", f"{name}: returned None")
        try:
            if isinstance(result, str | bytes):  # float() would read "1", but such a return is a mistake
                raise TypeError
            value = float(result)  # takes bool, numpy and one-element tensors too
        except OverflowError:
            value = math.inf
        except Exception:  # of a __float__ of its own: torch raises RuntimeError for two elements
            return Score(0.0, "type", f"{name}: returned {type(result).__name__}, not a number")
        total += weight * value
        if not math.isfinite(total):
            return Score(0.0, "nonfinite", f"{name}: returned {value}")
    return Score(total)


def _die_with_parent(parent: int) -> None:
    """Linux: end this process when its parent is gone, however it went, even while a reward function hangs."""
    # The kernel does it, because a thread of ours gets no turn while a regular expression holds the GIL. Elsewhere a
    # worker ends when it next reads from the pipe that its parent left.
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() != parent:  # gone before the call
            os._exit(1)


def _limit_memory() -> None:
    """Linux: a call that eats memory gets MemoryError, and where all of the machine's is gone the worker goes first."""
    # RLIMIT_DATA rather than RLIMIT_AS: it leaves out what torch and CUDA map or reserve without ever filling it.
    if sys.platform == "linux":
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        limit = MEMORY_GIB * 2**30 if hard == resource.RLIM_INFINITY else min(hard, MEMORY_GIB * 2**30)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        Path("/proc/self/oom_score_adj").write_text("1000")


def _worker(rewards_json: str, parent: int, cwd: str, flag: str) -> None:
    """Load the rewards, say so, then answer one JSON line for each that comes, until there are none."""
    _die_with_parent(parent)
    _limit_memory()
    # The protocol moves to descriptors of its own: a print of the user's goes to stderr, an input() finds nothing, and
    # a process that the user's code forks does not keep the pipes open.
    requests, replies = os.dup(0), os.dup(1)
    worker = os.getpid()
    os.register_at_fork(after_in_child=lambda: (os.close(requests), os.close(replies), _die_with_parent(worker)))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    os.chdir(cwd)  # relative paths in the user's code mean what they mean where the script was started
    with os.fdopen(replies, "wb") as out, os.fdopen(requests, "rb") as lines:

        def send(reply: dict) -> None:
            out.write(json.dumps(reply).encode() + b"\n")
            out.flush()

        try:
            rewards = [(name, weight, load_reward(name, flag)) for name, weight in json.loads(rewards_json)]
        except ValueError as error:
            send({"load_error": str(error)})
            return
        send({"load_error": None})
        for line in lines:
            send(dataclasses.asdict(_judge(rewards, *json.loads(line))))


# ---- the trainer's side ----


def _plain(value: object) -> object:
    """What JSON has no form for (numpy, bytes, dates, decimals in a parquet row), as lists, numbers or text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _kill_group(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # all gone already (Linux, macOS)
        os.killpg(process.pid, signal.SIGKILL)


def _kill_strays(mark: str) -> None:
    """Linux: kill what a dead worker started in a session of its own, which the kill of its group has not reached."""
    wanted = f"{MARK}={mark}\0".encode()
    for _ in range(100 if sys.platform == "linux" else 0):  # they may start others meanwhile
        found = False
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # ended meanwhile, or another user's
                if wanted in path.read_bytes():  # of one that has ended nothing is left to read
                    os.kill(int(path.parent.name), signal.SIGKILL)
                    found = True
        if not found:
            return
        time.sleep(0.01)


def _ask(process: subprocess.Popen, line: bytes, limit_s: float) -> tuple[dict | None, bool]:
    """(the worker's reply to `line`, whether the limit passed); the reply is None where the worker is gone."""
    passed = threading.Event()

    def give_up() -> None:
        passed.set()
        _kill_group(process)  # ends a blocked write below as well as a blocked read

    timer = threading.Timer(limit_s, give_up)
    timer.daemon = True
    timer.start()
    try:
        process.stdin.write(line)
        process.stdin.flush()
        reply = process.stdout.readline()
    except BrokenPipeError:
        reply = b""
    finally:
        timer.cancel()
        timer.join()  # from here on it cannot fire
    return (json.loads(reply) if reply.endswith(b"\n") else None), passed.is_set()


def rules_of(spec: str, flag: str = "--reward") -> list[tuple[str, float]]:
    """The parts of a `--reward` value that are functions, not reward models."""
    return [(name, weight) for name, weight in parse_rewards(spec, flag) if not name.startswith("model:")]


class RewardPool:
    """Worker processes that score responses, each call within `timeout_s`; a hung or dead one is replaced.

    `submit` returns a Future of a Score. A worker's whole process group is killed, so what a reward function started
    goes with it. The clock of a call starts when a ready worker gets it; loading the user's file has START_LIMIT_S.

    Args: flag: the one that an error names. Units: timeout_s in seconds of wall clock.
    Raises: ValueError on a wrong `spec`; from a Future, where a worker cannot load the rewards (see check_reward).
    """

    def __init__(self, spec: str, num_workers: int, timeout_s: float, flag: str = "--reward"):
        assert num_workers >= 1 and timeout_s > 0, (num_workers, timeout_s)
        rewards = []
        for name, weight in rules_of(spec, flag):
            path, colon, function = name.rpartition(":")  # a built-in name has no path
            rewards.append((f"{Path(path).expanduser().resolve()}:{function}" if colon else name, weight))
        self.spec, self.timeout_s, self.flag = spec, timeout_s, flag
        self._command = [sys.executable, "-m", "utils.reward_pool", "--worker"]
        self._command += [json.dumps(rewards), str(os.getpid()), os.getcwd(), flag]
        self._tasks: queue.SimpleQueue = queue.SimpleQueue()
        self._lock, self._closed, self._live = threading.Lock(), False, set()
        self._timeouts = 0  # in a row, over all workers
        self._marks: dict[int, str] = {}  # of the live workers
        # Daemon threads rather than an executor, because an executor's are joined before atexit runs: a script that
        # fails would first score everything that is still queued.
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(num_workers)]
        for thread in self._threads:
            thread.start()
        atexit.register(self.close)

    def submit(self, response: str, row: dict) -> Future:
        """A Future of the Score of `response`; returns at once."""
        line = json.dumps([response, row], default=_plain).encode() + b"\n"  # ASCII, so that lone surrogates survive
        future: Future = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("the reward pool is closed")
            self._tasks.put((future, line))
        return future

    def close(self) -> None:
        """Kill the workers and what they started; waiting calls are cancelled, running ones raise RuntimeError."""
        atexit.unregister(self.close)
        with self._lock:
            self._closed = True
            for process in self._live:
                _kill_group(process)
            with contextlib.suppress(queue.Empty):
                while (task := self._tasks.get_nowait()) is not None:
                    task[0].cancel()
            for _ in self._threads:
                self._tasks.put(None)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self) -> None:
        """One thread: owns one worker process at a time and feeds it."""
        process = None
        while (task := self._tasks.get()) is not None:
            future, line = task
            if not future.set_running_or_notify_cancel():
                continue
            if self._timeouts >= TIMEOUTS_IN_A_ROW * len(self._threads):  # it always hangs: do not wait for each
                future.set_result(Score(0.0, "timeout", f"{self.spec}: {self._timeouts} calls in a row timed out"))
                continue
            try:
                process = process or self._start()
                reply, passed = _ask(process, line, self.timeout_s)
                self._timeouts = self._timeouts + 1 if passed else 0
                if reply is not None:
                    score = Score(**reply)
                elif passed:
                    score = Score(0.0, "timeout", f"{self.spec}: no answer within {self.timeout_s:g} s")
                elif self._closed:
                    raise RuntimeError("the reward pool was closed before this response was scored")
                else:
                    score = None
                if reply is None or passed:
                    code, process = self._end(process), None
                    # the kill reaches the group, not a worker that has ended: `code` is what it ended with
                    score = score or Score(0.0, "died", f"{self.spec}: the worker process ended with status {code}")
                future.set_result(score)
            except Exception as error:  # whoever waits for the future gets it
                future.set_exception(error)
        if process is not None:
            self._end(process)

    def _start(self) -> subprocess.Popen:
        with self._lock:
            if self._closed:
                raise RuntimeError("the reward pool is closed")
            mark = f"{os.getpid()}-{time.monotonic_ns()}"  # under the lock: no two alike
            process = subprocess.Popen(
                self._command,
                env={**os.environ, MARK: mark},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # a process group of its own, killed as one
                cwd=Path(__file__).resolve().parents[1],
            )
            self._live.add(process)
            self._marks[process.pid] = mark
        reply, passed = _ask(process, b"", START_LIMIT_S)
        if reply is None or reply["load_error"]:
            code = self._end(process)
            late = f"did not load within {START_LIMIT_S:g} s"
            gone = late if passed else f"ended its process while loading (status {code})"
            raise ValueError(reply["load_error"] if reply else f"{self.flag} {self.spec}: {gone}")
        return process

    def _end(self, process: subprocess.Popen) -> int:
        """Kill what is left of the worker's group and reap the worker; returns its status."""
        with self._lock:  # once reaped, its number may be another process's: nobody signals it after this
            self._live.discard(process)
            _kill_group(process)
        code = process.wait()
        _kill_strays(self._marks.pop(process.pid))
        with contextlib.suppress(BrokenPipeError):  # closing flushes what the dead worker never read
            process.stdin.close()
        process.stdout.close()
        return code


def check_reward(spec: str, row: dict, timeout_s: float, rows: str = "--train-files", flag: str = "--reward") -> None:
    """Score an empty response to a real row (of `rows`) once: a broken reward is found before any model loads.

    Raises: ValueError where the reward does not load, raises, hangs, dies, or returns something other than a finite
    number or None.
    """
    if not rules_of(spec, flag):
        return
    with RewardPool(spec, 1, timeout_s, flag) as pool:
        score = pool.submit("", row).result()
    if score.error not in (None, "unjudged"):
        rule = f"a reward must return a finite float or None for any string within {timeout_s:g} s"
        raise ValueError(f"{flag} {spec}: a trial call on {rows}, empty response, failed ({score.message}); {rule}")


if __name__ == "__main__":
    assert sys.argv[1] == "--worker", "run by RewardPool"
    _worker(sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
