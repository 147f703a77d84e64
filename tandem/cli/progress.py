"""How far a starting cluster is: one line that changes on a terminal, few lines elsewhere."""

from __future__ import annotations

from typing import TextIO

from controller.overview import Overview
from tandem.clock import Clock

__all__ = ["LoadingDisplay", "loading_line"]

_SPARSE_EVERY_S = 5.0


def loading_line(view: Overview) -> str:
    """Such as `prefill 0/1 ready, 43 % loaded · decode 1/1 ready`."""
    parts = []
    for role, pool in view.pools.items():
        part = f"{role} {pool.ready}/{pool.wanted} ready"
        starting = [w for w in view.workers if w.role == role and w.state == "starting"]
        total = sum(w.total_bytes for w in starting)
        if total:
            part += f", {100 * sum(w.loaded_bytes for w in starting) // total} % loaded"
        parts.append(part)
    return " · ".join(parts)


class LoadingDisplay:
    """Writes to `stream`; `live` says that it is a terminal."""

    def __init__(self, stream: TextIO, clock: Clock, *, live: bool) -> None:
        self._stream = stream
        self._clock = clock
        self._live = live
        self._start_s = clock.now()
        self._last_s = float("-inf")
        self._width = 0

    def show(self, text: str) -> None:
        """Called as often as there is news, and more; unlive streams get a line each few seconds."""
        now_s = self._clock.now()
        line = f"tandem: {text} ({now_s - self._start_s:.0f} s)"
        if self._live:
            self._stream.write("\r" + line.ljust(self._width))
            self._width = len(line)
        elif now_s - self._last_s >= _SPARSE_EVERY_S:
            self._last_s = now_s
            self._stream.write(line + "\n")
        self._stream.flush()

    def clear(self) -> None:
        """Leave no half-written line behind."""
        if self._live and self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._stream.flush()
            self._width = 0
