"""How requests of clients come in over gRPC, whatever the method: within a bounded time, and refused by name if they are none.

Without it the server would wait for ever for the rest of a message, and answer bytes that do not parse with UNKNOWN and a
traceback in the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

__all__ = ["RequestReader"]


@dataclass(frozen=True, slots=True)
class _NoMessage:
    """Bytes that are not a message of the method's type, or none at all."""


class RequestReader(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """wait_s: the longest that the one request of a call may take to come; streams of requests may pause as they like."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        """All calls are served as streams of requests, since only those are read here rather than by the library."""
        handler = await continuation(details)
        if handler is None:
            return None
        serve = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        behaviour = self._stream_of_requests(serve) if handler.request_streaming else self._one_request(serve)
        make = grpc.stream_stream_rpc_method_handler if handler.response_streaming else grpc.stream_unary_rpc_method_handler
        return make(behaviour, partial(_parse, handler.request_deserializer), handler.response_serializer)

    def _one_request(self, serve: Callable[..., Any]) -> Callable[..., Any]:
        async def answers(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            async with contextlib.aclosing(serve(await self._first(requests, context), context)) as responses:
                async for response in responses:
                    yield response

        async def answer(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> Any:
            request = await self._first(requests, context)
            try:
                return await serve(request, context)
            except NotImplementedError:  # as generated code says of methods that nobody wrote, such as health's List
                await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this method is not served")

        return answers if inspect.isasyncgenfunction(serve) else answer

    def _stream_of_requests(self, serve: Callable[..., Any]) -> Callable[..., Any]:
        async def answers(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            async with _Messages(requests) as messages, contextlib.aclosing(serve(messages, context)) as responses:
                async for response in responses:
                    yield response
            await messages.abort_if_broken(context)

        async def answer(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> Any:
            async with _Messages(requests) as messages:
                response = await serve(messages, context)
            await messages.abort_if_broken(context)
            return response

        return answers if inspect.isasyncgenfunction(serve) else answer

    async def _first(self, requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> Any:
        messages = aiter(requests)
        try:
            async with asyncio.timeout(self._wait_s):
                request = await anext(messages)
        except TimeoutError:
            reason = f"the request did not come within {self._wait_s:g} s"
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, reason)
        except StopAsyncIteration:
            request = _NoMessage()
        finally:
            await _close(messages)
        if isinstance(request, _NoMessage):
            await _abort(context)
        return request


class _Messages:
    """A client's messages, up to the first that is none. A context, at whose end the library's own iterator is closed."""

    def __init__(self, requests: AsyncIterator[Any]) -> None:
        self._requests = aiter(requests)
        self._broken = False

    async def __aenter__(self) -> _Messages:
        return self

    async def __aexit__(self, *_: object) -> None:
        await _close(self._requests)

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        """No generator: one that a cancelled call leaves behind is closed by nobody in time."""
        request = await anext(self._requests)
        if isinstance(request, _NoMessage):
            self._broken = True
        if self._broken:
            raise StopAsyncIteration
        return request

    async def abort_if_broken(self, context: grpc.aio.ServicerContext) -> None:
        if self._broken:
            await _abort(context)


async def _close(messages: AsyncIterator[Any]) -> None:
    """The library's iterator is a generator. Left to the garbage collector, it may be closed while it is at work."""
    if isinstance(messages, AsyncGenerator):
        with contextlib.suppress(RuntimeError):  # a call that was cancelled has closed it, or is at it
            await messages.aclose()


async def _abort(context: grpc.aio.ServicerContext) -> None:
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "request: cannot be parsed as a message of this method")


def _parse(deserialize: Callable[[bytes], Any], data: bytes) -> Any:
    try:
        return deserialize(data)
    except DecodeError:
        return _NoMessage()
