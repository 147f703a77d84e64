"""Waiting for what other threads do, where no event tells of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["QUIET_S", "wait_until"]

QUIET_S = 2.0
"""How long a worker that ends waits for the last writes to be quiet, once it has handed over its work."""
_LOOK_S = 0.02


async def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Whether it came true within `timeout_s`. It is looked at a few dozen times a second."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + timeout_s
    while not condition():
        if loop.time() >= deadline_s:
            return False
        await asyncio.sleep(_LOOK_S)
    return True
