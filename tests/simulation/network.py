"""gRPC between processes of a `World`: what a channel does on a network that delays, breaks and cuts.

Messages of one stream keep their order; between streams and calls there is none. A cut holds everything up: what was sent
arrives when it heals, unless it lasted longer than the keepalive allows, or somebody resets the connection: then both ends
hear that it broke, and what was under way is gone. A stopped process answers no ping either.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from tests.simulation.world import Condition, Process, World

__all__ = ["Channel", "Network", "Rpc"]

_OK = grpc.StatusCode.OK
_CANCEL = object()


class _Abort(Exception):
    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code, self.details = code, details


class _End:
    """The last thing that a server says; of a call with one reply, together with it."""

    def __init__(self, code: grpc.StatusCode = _OK, details: str = "", reply: Any = None) -> None:
        self.code, self.details, self.reply = code, details, reply


class Network:
    """delay_s: bounds of what one message takes. keepalive_s: the longest silence that a connection survives."""

    def __init__(self, world: World, delay_s: tuple[float, float], keepalive_s: float) -> None:
        self.world = world
        self.keepalive_s = keepalive_s
        self.delay_s = delay_s
        self._random: random.Random = world.random("network")
        self._servers: dict[str, tuple[Process, dict[str, Any]]] = {}
        self._rpcs: dict[Rpc, None] = {}
        self._cuts: dict[frozenset[str], int] = {}
        self._num_cuts = 0
        self._known: set[Process] = set()

    def serve(self, address: str, process: Process, servicer: object, service: Any) -> None:
        """service: its descriptor."""
        handlers = {f"/{service.full_name}/{method.name}": getattr(servicer, method.name) for method in service.methods}
        self._servers[address] = (process, handlers)
        self._know(process)

    def channel(self, process: Process, address: str) -> Channel:
        self._know(process)
        return Channel(self, process, address)

    def _know(self, process: Process) -> None:
        """The connections of a process end with it."""
        if process not in self._known:
            self._known.add(process)
            process.on_death.append(lambda: self._died(process))

    def _died(self, process: Process) -> None:
        """Its kernel closes its connections: what it had sent may still arrive, before the news or not at all."""
        for rpc in [rpc for rpc in self._rpcs if process in (rpc.client, rpc.server)]:
            rpc.break_off(process if self._random.random() < 0.5 else None)

    def handler(self, address: str, path: str) -> tuple[Process, Any] | None:
        """None: nobody listens there (any more)."""
        server = self._servers.get(address)
        if server is None or server[0].condition is Condition.DEAD:
            return None
        return server[0], server[1][path]

    def delay(self) -> float:
        return self._random.uniform(*self.delay_s)

    # ---- what happens to it ----

    def is_cut(self, link: frozenset[str]) -> bool:
        return link in self._cuts

    def cut(self, link: frozenset[str]) -> None:
        self._num_cuts += 1
        number = self._cuts.setdefault(link, self._num_cuts)

        def look() -> None:
            if self._cuts.get(link) == number:
                self.reset(lambda rpc: rpc.link == link)

        self.world.at(self.world.now + self.keepalive_s, look)

    def heal(self, link: frozenset[str]) -> None:
        if self._cuts.pop(link, None) is not None:
            for rpc in [rpc for rpc in self._rpcs if rpc.link == link]:
                rpc.pump()

    def stopped(self, process: Process) -> None:
        """The process was stopped; if it still is when the keepalive ends, its connections break."""
        number = process.num_stops

        def look() -> None:
            if process.condition is Condition.STOPPED and process.num_stops == number:
                self.reset(lambda rpc: process in (rpc.client, rpc.server))

        self.world.at(self.world.now + self.keepalive_s, look)

    def reset(self, which: Callable[[Rpc], bool]) -> None:
        for rpc in [rpc for rpc in self._rpcs if which(rpc)]:
            rpc.break_off()

    def begun(self, rpc: Rpc) -> None:
        self._rpcs[rpc] = None

    def over(self, rpc: Rpc) -> None:
        self._rpcs.pop(rpc, None)


class Channel:
    """As `grpc.aio.Channel`, as far as the generated stubs use it. Belongs to the process in which it was made."""

    def __init__(self, network: Network, process: Process, address: str) -> None:
        self._network = network
        self._process = process
        self._address = address

    async def __aenter__(self) -> Channel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        pass

    def _begin(self, path: str) -> Rpc:
        return Rpc(self._network, self._process, self._address, path)

    def unary_unary(self, path: str, **_: object) -> Callable[..., Any]:
        async def call(request: Any, timeout: float | None = None, metadata: Any = None) -> Any:  # noqa: ASYNC109  gRPC's name
            rpc = self._begin(path)
            rpc.begin(is_request_stream=False, is_reply_stream=False)
            rpc.send(request)
            try:
                async with asyncio.timeout(timeout):
                    return await rpc.read()
            except TimeoutError:
                raise _error(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded") from None
            finally:
                rpc.cancel()

        return call

    def unary_stream(self, path: str, **_: object) -> Callable[..., Rpc]:
        def call(request: Any, metadata: Any = None) -> Rpc:
            rpc = self._begin(path)
            rpc.begin(is_request_stream=False, is_reply_stream=True)
            rpc.send(request)
            return rpc

        return call

    def stream_stream(self, path: str, **_: object) -> Callable[[], Rpc]:
        def call(metadata: Any = None) -> Rpc:
            rpc = self._begin(path)
            rpc.begin(is_request_stream=True, is_reply_stream=True)
            return rpc

        return call


class _Pipe:
    """One direction of one stream."""

    def __init__(self, rpc: Rpc, receiver: Process, deliver: Callable[[Any], None]) -> None:
        self._rpc = rpc
        self._receiver = receiver
        self._deliver = deliver
        self._items: deque[tuple[float, Any]] = deque()
        self._last = 0.0
        self.is_closed = False

    def send(self, item: Any) -> None:
        network = self._rpc.network
        if self.is_closed:
            return
        self._last = max(self._last, network.world.now + network.delay())
        self._items.append((self._last, item))
        network.world.at(self._last, self.pump)

    def pump(self) -> None:
        network = self._rpc.network
        while self._items and self._items[0][0] <= network.world.now and not network.is_cut(self._rpc.link):
            _, item = self._items.popleft()
            self._receiver.call_soon(self._deliver, item)

    def close(self, last: Any = None) -> None:
        """What has not arrived never will; or it does, and then `last`."""
        if last is None:
            self._items.clear()
        elif not self.is_closed:
            self.send(last)
        self.is_closed = True


class Rpc:
    """One call, both its ends. The client's end is a `grpc.aio` call: `read`, `write`, `cancel`, or iteration."""

    def __init__(self, network: Network, client: Process, address: str, path: str) -> None:
        found = network.handler(address, path)
        self.network = network
        self.client = client
        self.server = found[0] if found else None
        self._handler = found[1] if found else None
        self.link = frozenset((client.name, self.server.name)) if self.server else frozenset((client.name,))
        self._up = _Pipe(self, self.server or client, self._at_server)
        self._down = _Pipe(self, client, self._at_client)
        self._arrived: deque[Any] = deque()
        self._end: _End | None = None
        self._news: asyncio.Future[None] | None = None
        self._requests: asyncio.Queue[Any] | None = None
        self._serving: asyncio.Task[None] | None = None
        self._is_cancelled = False

    def begin(self, *, is_request_stream: bool, is_reply_stream: bool) -> None:
        self._is_request_stream, self._is_reply_stream = is_request_stream, is_reply_stream
        if self.server is None:
            self._up.close()
            refused = _End(grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses")
            self.client.call_later(self.network.delay(), self._at_client, refused)
        else:
            self.network.begun(self)

    def pump(self) -> None:
        self._up.pump()
        self._down.pump()

    def break_off(self, after: Process | None = None) -> None:
        """Both ends hear of it, each in its own time. after: what this one has sent arrives before."""
        broken = _End(grpc.StatusCode.UNAVAILABLE, "Connection reset by peer")
        if after is not None:
            (self._up if after is self.client else self._down).close(_CANCEL if after is self.client else broken)
            return
        self.network.over(self)
        self._up.close()
        self._down.close()
        self.client.call_later(self.network.delay(), self._at_client, broken)
        if self.server is not None:
            self.server.call_later(self.network.delay(), self._cancel_serving)

    # ---- the client's end ----

    def send(self, message: Any) -> None:
        self._up.send(message)

    async def write(self, message: Any) -> None:
        if self._end is not None:
            raise asyncio.InvalidStateError("the call has ended")
        self._up.send(message)

    async def read(self) -> Any:
        while not self._arrived:
            if self._end is not None:
                if self._end.code is _OK:
                    return grpc.aio.EOF
                raise _error(self._end.code, self._end.details)
            self._news = self.client.create_future()
            await self._news
        return self._arrived.popleft()

    def cancel(self) -> bool:
        if self._end is None and not self._is_cancelled:
            self._is_cancelled = True
            self._up.send(_CANCEL)
            self._down.close()
        return True

    def __aiter__(self) -> Rpc:
        return self

    async def __anext__(self) -> Any:
        message = await self.read()
        if message is grpc.aio.EOF:
            raise StopAsyncIteration
        return message

    def _at_client(self, item: Any) -> None:
        if isinstance(item, _End):
            if item.reply is not None:
                self._arrived.append(item.reply)
            self._end = self._end or item
            self.network.over(self)
        else:
            self._arrived.append(item)
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    # ---- the server's end ----

    def _at_server(self, item: Any) -> None:
        assert self.server is not None
        if item is _CANCEL:  # a handler that has just begun may come to its end first
            self.server.call_later(self.network.delay(), self._cancel_serving)
            return
        if self._requests is None:
            self._requests = asyncio.Queue()
            self._serving = self.server.create_task(self._serve())
        self._requests.put_nowait(item)

    def _cancel_serving(self) -> None:
        self.network.over(self)
        if self._serving is not None:
            self._serving.cancel()

    async def _serve(self) -> None:
        try:
            self._down.send(_End(reply=await self._answer()))
        except _Abort as abort:
            self._down.send(_End(abort.code, abort.details))

    async def _answer(self) -> Any:
        assert self._requests is not None
        request = _Requests(self._requests) if self._is_request_stream else await self._requests.get()
        if not self._is_reply_stream:
            return await self._handler(request, _Context())
        async for reply in self._handler(request, _Context()):
            self._down.send(reply)
        return None


class _Requests:
    """What comes from the client, until the call is cancelled."""

    def __init__(self, requests: asyncio.Queue[Any]) -> None:
        self._requests = requests

    def __aiter__(self) -> _Requests:
        return self

    async def __anext__(self) -> Any:
        return await self._requests.get()


class _Context:
    async def abort(self, code: grpc.StatusCode, details: str = "") -> None:
        raise _Abort(code, details)


def _error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(code, nothing, nothing, details)
