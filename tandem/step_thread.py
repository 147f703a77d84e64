"""The thread in which a worker computes."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable

__all__ = ["step_thread"]

_NICER = 5
"""Than the worker's other threads. What they have to say takes a tenth of a millisecond and is waited for elsewhere; where
every core computes, the kernel would let each of them wait for some milliseconds at every message. It counts beside busy
processes of others too, where the kernel weighs threads of both against each other: a third of the share of one of theirs."""
_MOST = 19


def step_thread(run: Callable[[], None], name: str) -> threading.Thread:
    """For a loop that computes step after step: of the same process, all other threads go first. Not started yet."""

    def target() -> None:
        if sys.platform == "linux":  # where niceness is a thread's own
            thread_id = threading.get_native_id()
            with contextlib.suppress(OSError):  # an order that nobody keeps costs some milliseconds, no worker
                niceness = os.getpriority(os.PRIO_PROCESS, thread_id) + _NICER
                os.setpriority(os.PRIO_PROCESS, thread_id, min(_MOST, niceness))
        run()

    return threading.Thread(target=target, name=name, daemon=True)
