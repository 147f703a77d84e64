"""How the threads of a worker talk: an inbox into the step loop, and one outbox per router out of it."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from google.protobuf.message import Message

__all__ = ["Inbox", "Outbox", "SessionHub"]

T = TypeVar("T")


M = TypeVar("M", bound=Message)


class Inbox(Generic[T]):
    """Any thread puts, the step loop takes everything that is there."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[T] = queue.SimpleQueue()

    def put(self, item: T) -> None:
        self._queue.put(item)

    def take(self, wait_s: float) -> list[T]:
        """All that waits; if nothing does, block up to `wait_s` seconds for the first item."""
        items: list[T] = []
        try:
            items.append(self._queue.get(block=wait_s > 0, timeout=wait_s or None))
            while True:
                items.append(self._queue.get_nowait())
        except queue.Empty:
            return items


class Outbox(Generic[M]):
    """Events for one router, merged into one message until its session is ready to send.

    The step loop posts from its thread, the session awaits on the event loop. What accumulates is bounded by the work
    that this router placed here: each of its requests adds at most its own tokens.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, empty: Callable[[], M]) -> None:
        self._loop = loop
        self._empty = empty
        self._lock = threading.Lock()
        self._pending = empty()
        self._wake = asyncio.Event()

    def post(self, message: M) -> None:
        with self._lock:
            was_empty = self._pending.ByteSize() == 0
            self._pending.MergeFrom(message)
        if was_empty:
            self._loop.call_soon_threadsafe(self._wake.set)

    def nudge(self) -> None:
        """Let a waiting `take` return what there is, now. Called on the event loop."""
        self._wake.set()

    async def take(self, timeout_s: float) -> M:
        """What has accumulated; an empty message after `timeout_s` of silence, which serves as heartbeat."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()
        with self._lock:
            taken, self._pending = self._pending, self._empty()
        return taken


class SessionHub(Generic[M]):
    """The outboxes of all routers that have a session with this worker."""

    def __init__(self, empty: Callable[[], M]) -> None:
        self._empty = empty
        self._lock = threading.Lock()
        self._outboxes: dict[str, Outbox[M]] = {}

    def open(self, router_id: str, loop: asyncio.AbstractEventLoop) -> Outbox[M]:
        """Start a session; a session that the same router still had gets nothing more."""
        outbox = Outbox(loop, self._empty)
        with self._lock:
            self._outboxes[router_id] = outbox
        return outbox

    def close(self, router_id: str, outbox: Outbox[M]) -> bool:
        """End a session. False if a newer one of the same router has taken its place."""
        with self._lock:
            if self._outboxes.get(router_id) is not outbox:
                return False
            del self._outboxes[router_id]
            return True

    def is_open(self, router_id: str) -> bool:
        with self._lock:
            return router_id in self._outboxes

    def wake(self) -> None:
        """Let every session send what it has, at least a load, now. Called on the event loop."""
        with self._lock:
            outboxes = list(self._outboxes.values())
        for outbox in outboxes:
            outbox.nudge()

    def post(self, router_id: str, message: M) -> None:
        """Events for a router that has gone are dropped: its requests are being cancelled."""
        with self._lock:
            outbox = self._outboxes.get(router_id)
        if outbox is not None:
            outbox.post(message)
