"""The gRPC side of the controller: routers watch membership here."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc.aio

from controller.controller import Controller
from tandem.rpc import bind, create_internal_server
from tandem.trust import Trust
from tandem.v1 import worker_pb2, worker_pb2_grpc

__all__ = ["MembershipServer"]


class _Membership(worker_pb2_grpc.MembershipServicer):
    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    async def Watch(self, request: worker_pb2.WatchRequest, context: object) -> AsyncIterator[worker_pb2.MembershipSnapshot]:
        """The whole membership at once, then again at every change, until the watcher goes away."""
        version = 0
        while True:
            snapshot = await self._controller.snapshot_after(version)
            version = snapshot.version
            yield snapshot


class MembershipServer:
    """Listens from construction on."""

    def __init__(self, server: grpc.aio.Server, address: str) -> None:
        self._server = server
        self.address = address

    @classmethod
    async def start(cls, controller: Controller, host: str, trust: Trust, port: int = 0) -> MembershipServer:
        """port 0: the system chooses. Raises ConfigError: the port cannot be had."""
        server = create_internal_server(trust)
        worker_pb2_grpc.add_MembershipServicer_to_server(_Membership(controller), server)
        port = bind(server, host, port, trust.certificates)
        await server.start()
        return cls(server, f"{host}:{port}")

    async def stop(self) -> None:
        await self._server.stop(grace=None)
