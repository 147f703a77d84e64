"""One gRPC call between two processes: both its ends, and the two ways between them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from tests.simulation.world import Process

if TYPE_CHECKING:
    from tests.simulation.network import Network

__all__ = ["Rpc", "rpc_error"]

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
                raise rpc_error(self._end.code, self._end.details)
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


def rpc_error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(code, nothing, nothing, details)
