"""The thread in which a worker computes."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

__all__ = ["step_thread"]

_NICENESS = 5
"""Above that of the worker's other threads. What they have to say takes a tenth of a millisecond and is waited for elsewhere;
where every core computes, the kernel would let each of them wait for some milliseconds at every message."""


def step_thread(run: Callable[[], None], name: str) -> threading.Thread:
    """For a loop that computes step after step: of the same process, all other threads go first. Not started yet."""

    def target() -> None:
        if sys.platform == "linux":  # where niceness is a thread's own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        run()

    return threading.Thread(target=target, name=name, daemon=True)
