"""The worker's end of a session with one router: commands in, one merged message of events out per step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

from tandem.errors import InvalidRequest
from tandem.mailbox import SessionHub
from tandem.measures import Measures
from tandem.v1 import worker_pb2 as pb
from tandem.wire import series_to_wire

__all__ = ["HEARTBEAT_S", "serve_session"]

HEARTBEAT_S = 1.0
"""A session that has nothing to say says so this often; routers take three times as much silence for death."""

Events = TypeVar("Events", pb.PrefillEvents, pb.DecodeEvents)
Command = TypeVar("Command", pb.PrefillCommand, pb.DecodeCommand)


async def serve_session(
    hub: SessionHub[Events],
    commands: AsyncIterator[Command],
    handle: Callable[[str, Command], None],
    gone: Callable[[str], None],
    load: Callable[[], pb.WorkerLoad],
    measures: Measures,
) -> AsyncIterator[Events]:
    """Yield events for as long as both ends live; `handle(router_id, command)` is called for each command but the hello.

    However the session ends, `gone(router_id)` is called once; when a newer session of the same router replaces it, before
    that one's first command is read: a router that connects again has given up what it had placed before.

    Raises:
        InvalidRequest: the first command is no hello.
    """
    first = await anext(commands, None)
    if first is None or not first.hello:
        raise InvalidRequest("hello", "the first command of a session names the router")
    router_id = first.hello
    if hub.is_open(router_id):
        gone(router_id)
    outbox = hub.open(router_id, asyncio.get_running_loop())
    reader = asyncio.create_task(_read(commands, router_id, handle))
    reader.add_done_callback(lambda _: outbox.nudge())
    told = _Told(measures)
    try:
        yield told.with_load(await outbox.take(0.0), load())
        while not reader.done():
            yield told.with_load(await outbox.take(HEARTBEAT_S), load())
        reader.result()
    finally:
        reader.cancel()
        if hub.close(router_id, outbox):
            gone(router_id)


async def _read(commands: AsyncIterator[Command], router_id: str, handle: Callable[[str, Command], None]) -> None:
    async for command in commands:
        handle(router_id, command)


class _Told:
    """What the router of this session knows already: an index of prefixes is sent when it has changed, of what is measured what
    was added since. What was measured before the session began is not for this router."""

    def __init__(self, measures: Measures) -> None:
        self._version = 0
        self._measures = measures
        self._measured = measures.series()
        self._measured_s = asyncio.get_running_loop().time()

    def with_load(self, message: Events, load: pb.WorkerLoad) -> Events:
        message.load.CopyFrom(load)
        if message.load.prefixes.version == self._version:
            message.load.ClearField("prefixes")
        else:
            self._version = message.load.prefixes.version
        now = asyncio.get_running_loop().time()
        if now - self._measured_s >= HEARTBEAT_S / 2:  # so that every heartbeat tells them
            self._measured_s = now
            added, self._measured = self._measures.since(self._measured)
            message.load.measured.extend(map(series_to_wire, added))
        return message
