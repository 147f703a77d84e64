"""The gRPC side of the controller: routers watch membership here, and pass on what operators ask."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import grpc.aio

from controller.controller import Controller, UnknownNode, UnknownWorker
from tandem.errors import InvalidRequest
from tandem.rpc import bind, create_internal_server
from tandem.trust import Trust
from tandem.v1 import operations_pb2, worker_pb2, worker_pb2_grpc

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


class _Control(worker_pb2_grpc.ControlServicer):
    """What is wrong with a wish is told by name; see `Operations` for the statuses."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    async def Scale(self, request: operations_pb2.ScaleRequest, context: grpc.aio.ServicerContext) -> operations_pb2.ScaleReply:
        try:
            wishes = {**request.wanted, **dict.fromkeys(request.all)}
            if not wishes:
                raise InvalidRequest("wanted", "names no pool")
            told = await self._controller.scale(wishes)
        except InvalidRequest as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        ready = {role: pool.ready for role, pool in self._controller.overview().pools.items()}
        sizes = {
            role: operations_pb2.PoolSize(
                wanted=wish.wanted,
                ready=ready[role],
                reason=wish.reason,
                offered=wish.offered,
                starting=wish.starting,
                draining=wish.draining,
            )
            for role, wish in told.items()
        }
        return operations_pb2.ScaleReply(pools=sizes)

    async def Drain(self, request: operations_pb2.DrainRequest, context: grpc.aio.ServicerContext) -> operations_pb2.DrainReply:
        try:
            return operations_pb2.DrainReply(worker_ids=await self._drain(request))
        except InvalidRequest as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except (UnknownWorker, UnknownNode) as error:
            await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
        raise AssertionError("abort does not return")

    async def _drain(self, request: operations_pb2.DrainRequest) -> list[str]:
        """Those that drain now."""
        if bool(request.worker_id) == bool(request.node):
            raise InvalidRequest("worker_id", "must be given, or node, and not both")
        drain_s = request.timeout_s if request.HasField("timeout_s") else None
        if request.node and request.uncordon:
            await self._controller.uncordon(request.node)
            return []
        if request.node:
            return await self._controller.drain_node(request.node, drain_s)
        await self._controller.drain(request.worker_id, drain_s)
        return [request.worker_id]

    async def Replace(
        self, request: operations_pb2.ReplaceRequest, context: grpc.aio.ServicerContext
    ) -> operations_pb2.ReplaceReply:
        try:
            worker_ids = await self._controller.replace(request.pool)
        except InvalidRequest as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return operations_pb2.ReplaceReply(worker_ids=worker_ids)


class MembershipServer:
    """Listens from construction on."""

    def __init__(self, server: grpc.aio.Server, host: str, port: int) -> None:
        self._server = server
        self.port = port
        self.address = f"{host}:{port}"

    @classmethod
    async def start(cls, controller: Controller, host: str, trust: Trust, port: int = 0) -> MembershipServer:
        """port: 0 lets the system choose.

        Raises:
            ConfigError: the port cannot be had.
        """
        server = create_internal_server(trust)
        worker_pb2_grpc.add_MembershipServicer_to_server(_Membership(controller), server)
        worker_pb2_grpc.add_ControlServicer_to_server(_Control(controller), server)
        port = bind(server, host, port, trust.certificates)
        await server.start()
        return cls(server, host, port)

    async def stop(self) -> None:
        await self._server.stop(grace=None)
