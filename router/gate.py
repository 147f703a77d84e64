"""API keys on gRPC: every call but those to the health service is refused without one, before a message of it is read."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health

from router.callers import Callers
from tandem.errors import Unauthenticated

__all__ = ["KeyInterceptor"]


class KeyInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    def __init__(self, callers: Callers) -> None:
        self._callers = callers

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        if not details.method.startswith(f"/{health.SERVICE_NAME}/"):
            try:
                self._callers.identify(details.invocation_metadata or ())
            except Unauthenticated as error:
                return _refuse(str(error))
        return await continuation(details)


def _refuse(reason: str) -> grpc.RpcMethodHandler:
    """A stream in both directions serves every kind of call, since it reads and writes nothing."""

    async def refuse(request_iterator: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, reason)

    return grpc.stream_stream_rpc_method_handler(refuse)
