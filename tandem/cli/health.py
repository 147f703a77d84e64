"""Whether the router at an address can serve, asked with the standard gRPC health service."""

from __future__ import annotations

import asyncio

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.rpc import create_channel
from tandem.trust import Certificates

__all__ = ["is_serving"]

_ANSWER_S = 2.0


def is_serving(address: str, certificates: Certificates | None = None) -> bool:
    """True when the router at `address` says SERVING; False when it says anything else, or nothing."""
    return asyncio.run(_is_serving(address, certificates))


async def _is_serving(address: str, certificates: Certificates | None) -> bool:
    async with create_channel(address, certificates=certificates) as channel:
        try:
            reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=_ANSWER_S)
        except grpc.aio.AioRpcError:
            return False
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
