"""A reward worker: a process that answers one JSON line (response, row) with one (value, or what was wrong).

Imports only the standard library and utils/rewards.py, so that it starts in no time. utils/reward_pool.py runs it, and
kills it where it hangs.
"""

import ctypes
import dataclasses
import json
import math
import os
import resource
import signal
import sys
from pathlib import Path

from utils.rewards import describe, load_reward

MEMORY_GIB = 8  # that a worker, and each process it starts, may fill; beyond it a call gets MemoryError


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


if __name__ == "__main__":
    _worker(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
