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
    over, told, other = threading.Event(), threading.Event(), (rank + 1) % world
    sign = ""  # of the other's life, the last
    silent = unanswered = 0  # twentieths of the limit since it changed, and since the store answered

    def live() -> None:
        nonlocal sign, silent, unanswered
        beats = 0
        while not over.wait(limit_s / 20):
            beats += 1
            try:  # no answer comes from a store whose host is frozen, nor an error
                store.set(f"watchdog/{rank}", f"{beats} {_last_words}")
                new = store.get(f"watchdog/{other}").decode()
            except dist.DistStoreError:  # late
                continue
            except dist.DistError:  # its host is gone
                return
            unanswered = 0
            if new != sign or new == "over":
                sign, silent = new, 0

    def judge() -> None:
        nonlocal silent, unanswered
        # Counted, not read off a clock: a rank that is stopped itself, as all of a suspended job, counts nothing.
        while silent <= 20 and not told.wait(limit_s / 20):
            silent, unanswered = silent + 1, unanswered + 1
        if silent <= 20:
            return
        who = f"rank {other}" if unanswered < 10 else f"the launcher's host, {os.environ['MASTER_ADDR']},"
        try:
            print(
                f"error: {who} has shown no sign of life for {limit_s:g} s; rank {other} was last at: "
                f"{sign.partition(' ')[2]}; a larger --hang-timeout-s waits longer; --resume auto goes on from the "
                "newest checkpoint",
                file=sys.stderr,
                flush=True,
            )
        finally:  # whoever read stderr may be gone too
            os._exit(1)  # the main thread waits in a collective that no exception reaches

    store.set(f"watchdog/{rank}", f"0 {_last_words}")
    dist.barrier()
    living, judging = (threading.Thread(target=each, daemon=True) for each in (live, judge))
    living.start()
    judging.start()

    def end() -> None:  # before the interpreter does, which no thread in the store's code may outlive
        over.set()
        living.join()  # judged to the end
        with contextlib.suppress(dist.DistError):
            store.set(f"watchdog/{rank}", "over")
        told.set()
        judging.join()

    atexit.register(end)
