"""Work for a client, as long as it is there; and answers that are streamed to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from typing import Any, TypeVar

from starlette.responses import Response

__all__ = ["ClientLeft", "EventStream", "unless_gone"]

T = TypeVar("T")
Message = MutableMapping[str, Any]


class ClientLeft(Exception):
    """Nobody is there to be answered."""


async def unless_gone(receive: Callable[[], Awaitable[Message]], work: Awaitable[T]) -> T:
    """What `work` gives; it is cancelled as soon as the client has left. The body has been read.

    Raises:
        ClientLeft: before the work was done.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeft
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.wait((working, leaving))
        if not working.cancelled():
            working.exception()  # seen


async def _until_gone(receive: Callable[[], Awaitable[Message]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events as they come.

    Unlike starlette's own it cancels what is under way once when the client leaves. A task group of anyio does it again at
    every await, so that the generators behind could close nothing.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None]) -> None:
        self.status_code = 200
        self.background = None
        self._events = events
        self.init_headers({"cache-control": "no-cache"})

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        with contextlib.suppress(ClientLeft):
            await unless_gone(receive, self._write(send))

    async def _write(self, send: Callable[[Message], Awaitable[None]]) -> None:
        async with contextlib.aclosing(self._events):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for event in self._events:
                await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
