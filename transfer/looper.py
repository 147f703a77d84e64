"""A thread that repeats one step: soon while there is something to watch, seldom otherwise, at once when woken."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

__all__ = ["Looper"]

_log = logging.getLogger(__name__)


class Looper:
    """`step` does the work and returns the seconds until the next look. `on_error` is called in the thread when a step
    raised, which ends the thread: after a bug no more bytes are moved."""

    def __init__(self, name: str, step: Callable[[], float], on_error: Callable[[], None]) -> None:
        self._name = name
        self._step = step
        self._on_error = on_error
        self._wake = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def wake(self) -> None:
        self._wake.set()

    def stop(self) -> None:
        """Returns when the thread has ended."""
        self._stopping = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._wake.wait(self._step())
                self._wake.clear()
        except Exception:  # noqa: BLE001  the thread ends here
            _log.exception("the thread %s ends", self._name)
            self._on_error()
