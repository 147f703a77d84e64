"""The router's process: start, serve, stop in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from typing import NamedTuple

import grpc.aio

from router.callers import Callers
from router.fleet import Fleet
from router.handles import GrpcWorkerHandle
from router.http.app import Gateway
from router.http.server import HttpServer, start_http
from router.membership import follow
from router.operations import OperationsService
from router.pipeline import Pipeline
from router.server import HealthReporter, InferenceService, build_server
from router.state import WORKER_STATES, WorkerTable
from router.tokenizers import tokenizer_loader
from router.worker import DECODE, PREFILL, WorkerInfo
from tandem.clock import MonotonicClock
from tandem.config import RouterConfig
from tandem.measures import Measures
from tandem.metrics import MEASURED, POOLS, REQUESTS, WORKERS, Load, exposition
from tandem.request import Phase
from tandem.rpc import bind, create_internal_channel
from tandem.tracing import make_tracer
from tandem.trust import Certificates, Trust
from tandem.v1 import worker_pb2_grpc

__all__ = ["Ports", "requests_by_phase", "run_router", "serve", "workers_by_state"]

log = logging.getLogger(__name__)

_LASTING = (Phase.RECEIVED, Phase.QUEUED, Phase.PREFILLING, Phase.DECODING)


class Ports(NamedTuple):
    grpc: int
    http: int


async def serve(config: RouterConfig, controller_address: str, on_ready: Callable[[Ports], None]) -> None:
    """Serve until SIGTERM or SIGINT; then finish the streams that run, for a bounded time. A second signal ends at once.

    on_ready: called with the ports once clients can connect (whether workers are there is another matter; see health).

    Raises:
        ConfigError: a port cannot be had, there is no cluster secret, or a certificate cannot be used.
    """
    trust, certificates = Trust.load(config.trust), Certificates.load(config.tls)
    router_id = f"router-{uuid.uuid4().hex[:12]}"
    table, measures = WorkerTable(), Measures()

    def connect(info: WorkerInfo) -> GrpcWorkerHandle:
        return GrpcWorkerHandle(info, router_id, trust, lambda: table.changed(info.id), measures=measures)

    fleet = Fleet(table, connect, tokenizer_loader(config.model))
    callers = Callers.load(config.api_keys_file)
    tracer = make_tracer(config.tracing, "router", router_id)
    clock = MonotonicClock()
    pipeline = Pipeline(config, table, lambda: fleet.model, clock, callers=callers, measures=measures, tracer=tracer)
    reporter = HealthReporter(table)
    await reporter.start()
    controller = create_internal_channel(controller_address, trust)
    control, operators = worker_pb2_grpc.ControlStub(controller), frozenset(config.operators.replace(",", " ").split())
    operations = OperationsService(pipeline, fleet, table, control, operators)
    services = InferenceService(pipeline, fleet), operations
    server = build_server(*services, reporter, config.max_message_bytes, config.connection_age_s)
    port = bind(server, config.host, config.grpc_port, certificates)
    gateway = Gateway(pipeline, fleet, table, config.max_message_bytes, exposition, lambda: reporter.stopped)
    bounds = config.client_timeout_s, config.max_connections
    http = await start_http(gateway.app(), config.host, config.http_port, config.tls, *bounds)
    with _shown(table, pipeline, measures), _signals() as (stop, hurry):
        await server.start()
        following = asyncio.create_task(follow(controller_address, router_id, trust, fleet), name="membership")
        on_ready(Ports(port, http.port))
        try:
            await _first(stop.wait(), following)
            await reporter.stop()
            log.info("stopping: no new requests; those that run have %.0f s", config.grace_s)
            # Shielded: a stop that is cut short by another is in order, one that is cancelled is told as an error by gRPC.
            await _first(asyncio.shield(_stop(server, http, config.grace_s)), hurry.wait())
        finally:
            following.cancel()
            await _stop(server, http, 0.0)
            await asyncio.wait([following])
            await fleet.close()
            await controller.close()
            await asyncio.to_thread(tracer.close)


def run_router(config: RouterConfig, controller_address: str) -> int:
    """Blocks until the router has stopped; returns the exit code."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    def announce(ports: Ports) -> None:
        sys.stdout.write(f"router listening on {config.host}:{ports.grpc}, http on {config.host}:{ports.http}\n")
        sys.stdout.flush()

    asyncio.run(serve(config, controller_address, announce))
    return 0


@contextlib.contextmanager
def _shown(table: WorkerTable, pipeline: Pipeline, measures: Measures) -> Iterator[None]:
    """What this router knows is on /metrics."""
    with contextlib.ExitStack() as hide:
        hide.callback(POOLS.add(lambda: _loads(table)))
        hide.callback(MEASURED.add(measures))
        hide.callback(REQUESTS.add(lambda: requests_by_phase(pipeline)))
        hide.callback(WORKERS.add(lambda: workers_by_state(table)))
        yield


def requests_by_phase(pipeline: Pipeline) -> Counter[tuple[str, ...]]:
    """Every phase that lasts, also when no request is in it: an idle router is not one that is gone."""
    held: Counter[tuple[str, ...]] = Counter({(phase.value,): 0 for phase in _LASTING})
    held.update({(phase,): count for phase, count in pipeline.num_by_phase.items()})
    return held


def workers_by_state(table: WorkerTable) -> Counter[tuple[str, ...]]:
    """Every pool and state."""
    known: Counter[tuple[str, ...]] = Counter(dict.fromkeys(product((PREFILL, DECODE), WORKER_STATES), 0))
    known.update((entry.handle.info.role, entry.state) for entry in table.entries)
    return known


def _loads(table: WorkerTable) -> Iterator[tuple[str, Load]]:
    """What every worker said last of its pools."""
    for entry in table.entries:
        if (load := entry.handle.load) is not None:
            yield entry.handle.info.role, load


def _stop(server: grpc.aio.Server, http: HttpServer, grace_s: float) -> asyncio.Future[tuple[object, None]]:
    return asyncio.gather(server.stop(grace_s or None), http.stop(grace_s))


async def _first(*things: object) -> None:
    """Wait for the first to end; what it raised is raised. Those made here are cancelled."""
    tasks = [asyncio.ensure_future(thing) for thing in things]  # type: ignore[call-overload]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()


@contextlib.contextmanager
def _signals() -> Iterator[tuple[asyncio.Event, asyncio.Event]]:
    """Set by the first and by the second signal."""
    stop, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    try:
        yield stop, hurry
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
