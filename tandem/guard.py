"""The cluster secret on the wire: in the metadata of every internal call, asked for before anything else is looked at."""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from tandem.secret import Secret

__all__ = ["SECRET_HEADER", "MetadataChannel", "SecretChannel", "SecretInterceptor"]

SECRET_HEADER = "tandem-cluster-secret-bin"

log = logging.getLogger(__name__)


class SecretInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses every call without the secret, of whatever kind and to whatever method, before a message of it is read."""

    def __init__(self, secret: Secret) -> None:
        self._expected = _digest(secret.reveal().encode())

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        given = [value for key, value in details.invocation_metadata or () if key == SECRET_HEADER]
        # Digests are of one length, so that the time tells nothing of the secret's.
        if len(given) == 1 and hmac.compare_digest(_digest(given[0]), self._expected):
            return await continuation(details)
        return _REFUSE_WITHOUT if not given else _REFUSE_OTHER


class MetadataChannel(grpc.aio.Channel):  # type: ignore[misc]
    """A channel whose calls all carry the same metadata. No interceptor: those cost a queue for each message of a stream."""

    def __init__(self, channel: grpc.aio.Channel, metadata: Sequence[tuple[str, str | bytes]]) -> None:
        self._channel = channel
        self._metadata = tuple(metadata)

    def unary_unary(self, *args: Any, **options: Any) -> Any:
        return self._with_metadata(self._channel.unary_unary(*args, **options))

    def unary_stream(self, *args: Any, **options: Any) -> Any:
        return self._with_metadata(self._channel.unary_stream(*args, **options))

    def stream_unary(self, *args: Any, **options: Any) -> Any:
        return self._with_metadata(self._channel.stream_unary(*args, **options))

    def stream_stream(self, *args: Any, **options: Any) -> Any:
        return self._with_metadata(self._channel.stream_stream(*args, **options))

    def _with_metadata(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, metadata: Any = None, **options: Any) -> Any:
            return method(*args, metadata=(*(metadata or ()), *self._metadata), **options)

        return call

    async def __aenter__(self) -> MetadataChannel:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()


class SecretChannel(MetadataChannel):
    """Of a process of the cluster."""

    def __init__(self, channel: grpc.aio.Channel, secret: Secret) -> None:
        super().__init__(channel, ((SECRET_HEADER, secret.reveal().encode()),))


def _digest(value: bytes) -> bytes:
    return hashlib.sha256(value).digest()


def _refuse(details: str) -> grpc.RpcMethodHandler:
    """A stream in both directions serves every kind of call, since it reads and writes nothing."""

    async def refuse(request_iterator: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        log.warning("refused a call of %s: %s", context.peer(), details)
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, details)

    return grpc.stream_stream_rpc_method_handler(refuse)


_REFUSE_WITHOUT = _refuse("the call carries no cluster secret; start every process of a cluster with the same secret")
_REFUSE_OTHER = _refuse("the call carries another cluster secret; start every process of a cluster with the same secret")
