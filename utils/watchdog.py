"""Ends a run in which a rank is frozen (stopped, swapped out, its machine gone) without having died.

The others would wait for it in a collective without limit. Each rank shows a sign of life to the launcher's store, from
a thread, and watches the rank after it; torchrun ends all others once one has ended. A rank that still runs and waits
for something that never comes is not seen by this.
"""

import atexit
import contextlib
import os
import sys
import threading
import time
from datetime import timedelta

import torch.distributed as dist

_last_words = "starting"


def say(words: str) -> None:
    """What this rank is at: what the others print as its last words, should it stop."""
    global _last_words
    _last_words = words


def watch(limit_s: float) -> None:
    """Start watching, once the process group is there; 0: do not. Args: limit_s: seconds without a sign of life."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if limit_s == 0 or world == 1:
        return
    # a connection of its own: a call that waits holds up all others on the same one
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), wait_for_workers=False)
    store.set_timeout(timedelta(seconds=limit_s / 4))
    over, other = threading.Event(), (rank + 1) % world

    def live() -> None:
        seen, since, beats = "", time.monotonic(), 0
        while not over.wait(limit_s / 20):
            try:
                beats += 1
                store.set(f"watchdog/{rank}", f"{beats} {_last_words}")
                sign = store.get(f"watchdog/{other}").decode()
            except dist.DistStoreError:  # no answer: its host may be frozen
                sign = seen
            except dist.DistError:  # the store's host is gone, and the launcher knows
                return
            now = time.monotonic()
            if sign != seen or sign == "over":
                seen, since = sign, now
            elif now - since > limit_s:
                words = seen.partition(" ")[2]
                rule = "a larger --hang-timeout-s waits longer; --resume auto goes on from the newest checkpoint"
                print(
                    f"error: rank {other} has shown no sign of life for {limit_s:g} s; its last words: {words}; {rule}",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(1)  # the main thread waits in a collective that no exception reaches

    store.set(f"watchdog/{rank}", f"0 {_last_words}")
    dist.barrier()
    thread = threading.Thread(target=live, daemon=True)
    thread.start()

    def end() -> None:  # before the interpreter does, which no thread in the store's code may outlive
        over.set()
        thread.join()
        with contextlib.suppress(dist.DistError):
            store.set(f"watchdog/{rank}", "over")

    atexit.register(end)
