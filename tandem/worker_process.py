"""A worker's process: what it sets up first, an event loop beside the main thread, and an end in good order on SIGTERM.

Knows no Ray: an actor is a thin shell around it, and so is any other process that runs a worker.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

__all__ = ["TERMINATED", "Host", "Progress", "WorkerProcess", "find_process", "prepare_process", "process_identity"]

T = TypeVar("T")
logger = logging.getLogger(__name__)

_SWITCH_INTERVAL_S = 0.0005
"""How long one Python thread may hold the interpreter while others wait. The default of 5 ms is as long as a whole
hand-off: the transfer thread must not wait that long behind the step loop."""
_LIVENESS_INTERVAL_S = 0.5
_EXIT_AT_ONCE = 1
_FAREWELL_S = 2.0
"""After SIGTERM the process stays for so long when all is done: whoever waits for its end must hear the reason first."""
TERMINATED = "it was asked to end by SIGTERM"
"""The reason with which `wait_stopped` returns then; what ran has ended or was handed over."""


def prepare_process(worker_id: str) -> None:
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {worker_id} %(levelname)s %(name)s: %(message)s")


def process_identity() -> tuple[int, int]:
    """Process id and start in ticks since boot: together they never name another process while the machine runs."""
    pid = os.getpid()
    found = find_process(pid)
    assert found is not None
    return pid, found[0]


def find_process(pid: int) -> tuple[int, str] | None:
    """Start in ticks since boot and state (Z: a zombie), as the kernel tells; None: there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()  # the name before may hold anything
    return int(fields[19]), fields[0]


class Host(Protocol):
    """A worker with its server."""

    @property
    def is_alive(self) -> bool: ...

    async def drain(self, drain_s: float | None = None) -> None:
        """Take no new work; return when what runs has ended or, after `drain_s` (None: as configured), was handed over."""
        ...

    async def stop(self) -> None: ...


H = TypeVar("H", bound=Host)
Progress = Callable[[int, int], None]


class WorkerProcess(Generic[H]):
    """Made in the main thread, which alone may set signal handlers. Its other methods may be called from any thread but the
    event loop's, and wait.

    start: makes the host; it reports bytes of weights loaded, and in all. SIGTERM drains the worker, after which
    `wait_stopped` returns and the process ends; one that has nothing to drain yet, and a second SIGTERM, end it at once.
    """

    def __init__(self, start: Callable[[Progress], Awaitable[H]]) -> None:
        self._start = start
        self._progress = (0, 0)
        self._host: H | None = None
        self._starting: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._num_waits = 0
        self._stopped = threading.Event()
        self._reason = "stopped"
        self._terminations = 0
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="events", daemon=True).start()
        signal.signal(signal.SIGTERM, self._on_terminate)

    @property
    def host(self) -> H:
        assert self._host is not None, "start comes first"
        return self._host

    @property
    def terminated(self) -> bool:
        """A signal has asked for the end."""
        return self._terminations > 0

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """What `coroutine` returns or raises on the worker's event loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def start(self) -> H:
        """Load the weights and serve. Called again, it waits for the same start."""

        async def make() -> None:
            self._host = await self._start(self._on_progress)

        async def start() -> None:
            if self._starting is None:
                self._starting = asyncio.ensure_future(make())
            await asyncio.shield(self._starting)

        self.run(start())
        return self.host

    def progress(self) -> tuple[int, int]:
        """Bytes of weights loaded, and in all. It comes from the event loop, so an answer says that the loop lives."""

        async def progress() -> tuple[int, int]:
            return self._progress

        return self.run(progress())

    def wait_stopped(self) -> str:
        """Returns when the worker has ended by itself or by `stop`, with the reason. A later call ends an earlier one, whose
        caller is taken for gone."""
        self._num_waits += 1
        mine = self._num_waits
        while not self._stopped.wait(_LIVENESS_INTERVAL_S):
            if mine != self._num_waits:
                return "another waits for the end"
            if self._host is not None and self._ending is None and not self._host.is_alive:
                return "a thread of the worker has ended; see its log"
        return self._reason

    def stop(self, drain_s: float | None = None) -> None:
        """Drain, then end; again is nothing more than to wait for it."""
        self.run(self._end("stopped", drain_s))

    async def _end(self, reason: str, drain_s: float | None = None) -> None:
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._drain_and_stop(reason, drain_s))
        await asyncio.shield(self._ending)

    async def _drain_and_stop(self, reason: str, drain_s: float | None) -> None:
        try:
            if self._host is not None:
                await self._host.drain(drain_s)
                await self._host.stop()
        finally:
            self._reason = reason
            self._stopped.set()
            if self.terminated:
                farewell = threading.Timer(_FAREWELL_S, os._exit, (0,))
                farewell.daemon = True
                farewell.start()

    def _on_terminate(self, number: int, frame: object) -> None:
        """In the main thread, between two instructions of whatever it does: so nothing here may wait or take a lock."""
        self._terminations += 1
        if self._terminations > 1 or self._host is None:
            os._exit(_EXIT_AT_ONCE if self._terminations > 1 else 0)
        asyncio.run_coroutine_threadsafe(self._end(TERMINATED), self._loop)

    def _on_progress(self, done_bytes: int, total_bytes: int) -> None:
        self._progress = (done_bytes, total_bytes)
