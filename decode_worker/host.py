"""A decode worker with its gRPC server: what an actor, or a test without Ray, starts and stops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc.aio

from decode_worker.service import DecodeService
from decode_worker.worker import DecodeWorker
from tandem.config import TransferConfig, WorkerConfig
from tandem.engine import Engine
from tandem.rpc import bind, create_server
from tandem.v1 import worker_pb2_grpc as pb_grpc
from transfer.agent import TransferAgent

__all__ = ["DecodeHost"]

_STOP_GRACE_S = 1.0


class DecodeHost:
    def __init__(self, worker: DecodeWorker, server: grpc.aio.Server) -> None:
        self.worker = worker
        self._server = server

    @classmethod
    async def start(
        cls,
        worker_id: str,
        config: WorkerConfig,
        make_agent: Callable[[str, TransferConfig], TransferAgent],
        progress: Callable[[int, int], None] | None = None,
    ) -> DecodeHost:
        """Load, listen, serve.

        Raises:
            ConfigError: the checkpoint, the memory budget or the port cannot be used.
        """
        engine = await asyncio.to_thread(Engine.build, config, progress)
        worker = DecodeWorker(worker_id, config, engine, make_agent(worker_id, config.transfer))
        server = create_server()
        pb_grpc.add_DecodeWorkerServicer_to_server(DecodeService(worker), server)
        port = bind(server, config.host, 0)
        worker.start(f"{config.host}:{port}")
        await server.start()
        return cls(worker, server)

    async def stop(self) -> None:
        await self._server.stop(_STOP_GRACE_S)
        await asyncio.to_thread(self.worker.stop)
