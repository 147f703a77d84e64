"""Time behind a seam, so that tests move it by hand."""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "FakeClock", "MonotonicClock"]


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since an arbitrary start; never goes back."""
        ...


class MonotonicClock:
    """CLOCK_MONOTONIC: comparable between processes of one machine, not between machines."""

    def now(self) -> float:
        return time.monotonic()


class FakeClock:
    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError("time does not go back")
        self._now += seconds
