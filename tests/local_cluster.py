"""A whole cluster in one process, without Ray: real workers, real router, real gRPC and, unless told otherwise, real NIXL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc.aio

from decode_worker.host import DecodeHost
from prefill_worker.host import PrefillHost
from router.fleet import Fleet, Member, Membership
from router.handles import GrpcWorkerHandle
from router.http.app import Gateway
from router.http.server import HttpServer, start_http
from router.membership import worker_of
from router.operations import OperationsService
from router.pipeline import Pipeline
from router.server import HealthReporter, InferenceService, build_server
from router.state import WorkerTable
from router.worker import WorkerInfo
from tandem.clock import MonotonicClock
from tandem.config import (
    CacheConfig,
    DecodeConfig,
    ModelSource,
    PrefillConfig,
    RouterConfig,
    TransferConfig,
    TrustConfig,
    WorkerConfig,
)
from tandem.measures import Measures
from tandem.metrics import exposition
from tandem.model.random_checkpoint import random_checkpoint
from tandem.parity import message_of
from tandem.request import Request
from tandem.rpc import bind, create_channel
from tandem.secret import Secret
from tandem.tokenizer import Tokenizer
from tandem.tracing import NO_TRACER, Tracer
from tandem.trust import Trust
from tandem.v1 import inference_pb2 as pb
from tandem.v1 import inference_pb2_grpc as pb_grpc
from tandem.v1 import kserve_pb2_grpc as kserve_grpc
from tandem.v1.worker_pb2 import WorkerDescription
from transfer.agent import TransferAgent
from transfer.nixl_agent import NixlAgent

MakeAgent = Callable[[str, TransferConfig], TransferAgent]
MakeTracer = Callable[[str, str], Tracer]  # of a role and an id

SECRET = Secret("of this test cluster only")
RANDOM = ModelSource(path=str(random_checkpoint()))
SMALL = WorkerConfig(
    model=RANDOM,
    trust=TrustConfig(SECRET),
    cache=CacheConfig(budget_bytes=64 << 20, max_sequences=8, block_size_tokens=16),
    prefill=PrefillConfig(chunk_tokens=64),
    decode=DecodeConfig(local_prefill_tokens=0),  # every prompt, however short, is handed off
    threads=1,
)


@dataclass(slots=True)
class Answer:
    tokens: list[int]
    finished: pb.Finished
    logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    prompt: pb.Prompt = field(default_factory=pb.Prompt)


class LocalCluster:
    def __init__(self, prefill: Sequence[PrefillHost], decode: Sequence[DecodeHost], router: LocalRouter) -> None:
        self.prefill = prefill
        self.decode = decode
        self.address = router.address
        self.stub = router.stub
        self.kserve = router.kserve
        self.http_url = f"http://127.0.0.1:{router.http.port}"
        self.stop_router = router.stop
        self.measures = router.measures

    async def generate(self, request: Request, timeout_s: float = 30.0) -> Answer:
        """The answer to `request`; end tokens of the model do not end it.

        Raises:
            grpc.aio.AioRpcError: the request failed.
        """
        answer = Answer([], pb.Finished())
        async for response in self.stub.Generate(message_of(request), timeout=timeout_s):
            answer.tokens.extend(response.token_ids)
            answer.logprobs.extend(response.logprobs)
            answer.prompt.MergeFrom(response.prompt)
            if response.HasField("finished"):
                answer.finished = response.finished
        return answer

    async def until_whole(self, timeout_s: float = 10.0) -> None:
        """Wait until every worker holds nothing and every pool sums to its size. Raises TimeoutError."""
        await until(lambda: all(_is_whole(host) for host in (*self.prefill, *self.decode)), timeout_s)


@asynccontextmanager
async def local_cluster(
    num_prefill: int = 1,
    num_decode: int = 1,
    config: WorkerConfig = SMALL,
    router: RouterConfig | None = None,
    make_prefill_agent: MakeAgent = NixlAgent,
    make_decode_agent: MakeAgent = NixlAgent,
    make_tracer: MakeTracer = lambda role, instance: NO_TRACER,
) -> AsyncIterator[LocalCluster]:
    life = id(asyncio.current_task())
    decode_ids = [f"decode-{life}-{i}" for i in range(num_decode)]
    prefill_ids = [f"prefill-{life}-{i}" for i in range(num_prefill)]
    decode = [await DecodeHost.start(i, config, make_decode_agent, tracer=make_tracer("decode", i)) for i in decode_ids]
    prefill = [await PrefillHost.start(i, config, make_prefill_agent, tracer=make_tracer("prefill", i)) for i in prefill_ids]
    for host in prefill:
        assert await host.worker.connect([d.worker.description for d in decode]) == []
    front = await LocalRouter.start(router or RouterConfig(grpc_port=0, http_port=0), make_tracer("router", "router-1"))
    await front.watch([host.worker.description for host in (*prefill, *decode)])
    yield LocalCluster(prefill, decode, front)
    await front.stop()
    for host in (*prefill, *decode):
        await host.stop()


class LocalRouter:
    """A router without a controller: it is told its workers. `stop` may be called twice."""

    def __init__(
        self,
        table: WorkerTable,
        fleet: Fleet,
        reporter: HealthReporter,
        server: grpc.aio.Server,
        port: int,
        http: HttpServer,
        measures: Measures,
    ) -> None:
        self.measures = measures
        self.table = table
        self.fleet = fleet
        self.http = http
        self._reporter = reporter
        self._server = server
        self.address = f"127.0.0.1:{port}"
        self._channel = create_channel(self.address)
        self.stub = pb_grpc.InferenceStub(self._channel)
        self.kserve = kserve_grpc.GRPCInferenceServiceStub(self._channel)

    @classmethod
    async def start(cls, config: RouterConfig, tracer: Tracer = NO_TRACER) -> LocalRouter:
        table, measures = WorkerTable(), Measures()

        def connect(info: WorkerInfo) -> GrpcWorkerHandle:
            return GrpcWorkerHandle(info, "router-1", Trust(SECRET), lambda: table.changed(info.id), measures=measures)

        fleet = Fleet(table, connect, Tokenizer.load)
        pipeline = Pipeline(config, table, lambda: fleet.model, MonotonicClock(), measures=measures, tracer=tracer)
        reporter = HealthReporter(table)
        await reporter.start()
        services = InferenceService(pipeline, fleet), OperationsService(pipeline, fleet, table)
        server = build_server(*services, reporter, config.max_message_bytes)
        port = bind(server, config.host, config.grpc_port)
        await server.start()
        gateway = Gateway(pipeline, fleet, table, config.max_message_bytes, exposition, lambda: reporter.stopped)
        http = await start_http(gateway.app(), config.host, config.http_port, config.tls)
        return cls(table, fleet, reporter, server, port, http, measures)

    async def watch(self, workers: Sequence[WorkerDescription]) -> None:
        await self.fleet.apply(Membership(tuple(Member(worker_of(worker)) for worker in workers)))
        await until(lambda: self.table.can_serve, 20.0)

    async def stop(self) -> None:
        await self._reporter.stop()
        await self._server.stop(None)
        await self.http.stop(0.0)
        await self.fleet.close()
        await self._channel.close()


async def until(condition: Callable[[], bool], timeout_s: float) -> None:
    """Real processes' threads have no event that a test could await: look until it holds. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def _is_whole(host: PrefillHost | DecodeHost) -> bool:
    load = host.worker.load()
    idle = not (load.queue or load.running or load.kv_blocks_used or load.state_slots_used)
    return idle and host.worker.pool_mismatches() == []


__all__ = ["RANDOM", "SMALL", "Answer", "LocalCluster", "local_cluster", "until"]
