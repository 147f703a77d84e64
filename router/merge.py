"""Several streams read as one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

__all__ = ["merge"]

T = TypeVar("T")


async def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Items of all streams as they come. The first error ends it; however it ends, every stream is closed.

    Of a reader that is slow each stream is at most one item ahead.
    """
    if len(streams) == 1:  # as most are: without a task for each item
        async with contextlib.aclosing(streams[0]) as stream:
            async for item in stream:
                yield item
        return
    reading = {asyncio.ensure_future(_next(stream)): stream for stream in streams}
    try:
        while reading:
            done, _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                source = reading.pop(task)
                for item in task.result():
                    yield item
                    reading[asyncio.ensure_future(_next(source))] = source
    finally:
        for task in reading:
            task.cancel()
        if reading:
            await asyncio.wait(reading)
        for task in reading:
            if not task.cancelled():
                task.exception()  # seen: one error is enough
        for stream in streams:
            await stream.aclose()


async def _next(stream: AsyncGenerator[T, None]) -> list[T]:
    """The next item alone; nothing at the end."""
    try:
        return [await anext(stream)]
    except StopAsyncIteration:
        return []
