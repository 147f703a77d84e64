"""A decode worker with its gRPC server: what an actor, or a test without Ray, starts and stops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc.aio

from decode_worker.service import DecodeService
from decode_worker.worker import DecodeWorker
from tandem.config import TransferConfig, WorkerConfig, transfer_of
from tandem.engine import Engine
from tandem.metrics import MetricsEndpoint, serve_metrics
from tandem.rpc import bind, create_internal_server
from tandem.tracing import Tracer, make_tracer
from tandem.trust import Trust
from tandem.v1 import worker_pb2_grpc as pb_grpc
from transfer.agent import TransferAgent

__all__ = ["DecodeHost"]

_STOP_GRACE_S = 1.0


class DecodeHost:
    def __init__(self, worker: DecodeWorker, server: grpc.aio.Server, metrics: MetricsEndpoint, tracer: Tracer) -> None:
        self.worker = worker
        self._server = server
        self._metrics = metrics
        self._tracer = tracer

    @classmethod
    async def start(
        cls,
        worker_id: str,
        config: WorkerConfig,
        make_agent: Callable[[str, TransferConfig], TransferAgent],
        progress: Callable[[int, int], None] | None = None,
        tracer: Tracer | None = None,
    ) -> DecodeHost:
        """Load, listen, serve. tracer: None: as configured.

        Raises:
            ConfigError: the cluster secret, a certificate, the checkpoint, the memory budget or the port cannot be used.
        """
        trust = Trust.load(config.trust)
        tracer = tracer or make_tracer(config.tracing, "decode", worker_id)
        metrics = serve_metrics(config.host, config.metrics_port)
        engine = await asyncio.to_thread(Engine.build, config, progress)
        worker = DecodeWorker(worker_id, config, engine, make_agent(worker_id, transfer_of(config)), tracer)
        server = create_internal_server(trust)
        pb_grpc.add_DecodeWorkerServicer_to_server(DecodeService(worker), server)
        port = bind(server, config.host, 0, trust.certificates)
        worker.start(f"{config.host}:{port}", metrics.address)
        await server.start()
        return cls(worker, server, metrics, tracer)

    @property
    def is_alive(self) -> bool:
        return self.worker.is_alive

    async def drain(self, drain_s: float | None = None) -> None:
        await self.worker.drain(drain_s)

    async def stop(self) -> None:
        await self._server.stop(_STOP_GRACE_S)
        await asyncio.to_thread(self._metrics.stop)
        await asyncio.to_thread(self.worker.stop)
        await asyncio.to_thread(self._tracer.close)
