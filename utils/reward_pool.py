"""Killable worker processes that run reward functions: a hung, crashing or printing one cannot hurt the trainer.

What runs in them: utils/reward_worker.py.
"""

import atexit
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path

from utils.reward_worker import Score
from utils.rewards import parse_rewards

TIMEOUTS_IN_A_ROW = 8  # per worker; then no more of the batch is called, and the trainer sees it without a score
MARK = "RESHARD_REWARD_WORKER"  # in the environment of a worker, and of all that it starts
START_LIMIT_S = 60.0  # a worker's start runs the imports of the user's file, which may be slow (sympy, torch)


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
        self._command = [sys.executable, "-m", "utils.reward_worker"]
        self._command += [json.dumps(rewards), str(os.getpid()), os.getcwd(), flag]
        self._tasks: queue.SimpleQueue = queue.SimpleQueue()
        self._lock, self._closed, self._live = threading.Lock(), False, set()
        self._timeouts = 0  # in a row, over all workers
        self._loads = False  # a worker could load the rewards once
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

    def ask_again(self) -> None:
        """Forget the timeouts in a row, so that the next batch is scored again."""
        self._timeouts = 0

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
                try:
                    process = process or self._start()
                    self._loads = True
                except ValueError as error:
                    if not self._loads:
                        raise
                    self._timeouts += 1  # what it needs is gone, for a time perhaps
                    future.set_result(Score(0.0, "died", str(error)))
                    continue
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
