"""The router as a process: it listens, follows a controller, and stops in order."""

import asyncio
import gc
import logging
import os
import signal
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from router.main import Ports, requests_by_phase, serve, workers_by_state
from router.state import WORKER_STATES
from tandem.config import RouterConfig, TrustConfig
from tandem.errors import ConfigError
from tandem.rpc import create_channel
from tandem.secret import Secret
from tandem.v1 import operations_pb2 as operations
from tandem.v1 import operations_pb2_grpc as operations_grpc
from tests.router.tools import Bench

TRUSTED = TrustConfig(Secret("of the router's tests"))
ANY_PORT = RouterConfig(grpc_port=0, http_port=0, trust=TRUSTED)
NO_CONTROLLER = "127.0.0.1:1"


async def start() -> tuple["asyncio.Task[None]", Ports]:
    ready: asyncio.Future[Ports] = asyncio.get_running_loop().create_future()
    running = asyncio.create_task(serve(ANY_PORT, NO_CONTROLLER, ready.set_result))
    return running, await ready


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_it_serves_without_a_controller_and_ends_in_order(number: signal.Signals) -> None:
    running, ports = await start()
    async with create_channel(f"127.0.0.1:{ports.grpc}") as channel:
        status = await operations_grpc.OperationsStub(channel).GetStatus(operations.GetStatusRequest())
        assert (status.model_name, len(status.workers)) == ("", 0)
    os.kill(os.getpid(), number)
    await asyncio.wait_for(running, 5)


async def test_a_second_signal_ends_it_at_once_and_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    running, ports = await start()
    async with create_channel(f"127.0.0.1:{ports.grpc}") as channel:
        unsaid = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")()
        await unsaid.write(b"")
        await unsaid.read()  # that nothing is asked for; so the router has the call, and it stays open
        os.kill(os.getpid(), signal.SIGTERM)
        done, _ = await asyncio.wait([running], timeout=0.5)
        assert not done  # a call is open
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(running, 5)
    del running
    gc.collect()  # exceptions that nobody asked for are told then
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_a_port_in_use_is_told_in_one_sentence() -> None:
    running, ports = await start()
    with pytest.raises(ConfigError, match=rf"cannot listen on 127\.0\.0\.1:{ports.grpc}"):
        await serve(RouterConfig(grpc_port=ports.grpc, trust=TRUSTED), NO_CONTROLLER, lambda ports: None)
    with pytest.raises(ConfigError, match=rf"cannot listen for HTTP on 127\.0\.0\.1:{ports.http}"):
        await serve(RouterConfig(grpc_port=0, http_port=ports.http, trust=TRUSTED), NO_CONTROLLER, lambda ports: None)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(running, 5)


def test_importing_the_router_brings_nothing_heavy() -> None:
    code = "import sys, router.main; sys.exit(any(m in sys.modules for m in ('torch', 'ray', 'nixl', 'transformers', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=Path(__file__).parents[2]).returncode == 0


async def test_an_idle_router_shows_every_phase_and_every_state_of_workers_at_0() -> None:
    bench = Bench(1, 2)
    assert requests_by_phase(bench.pipeline) == {("received",): 0, ("queued",): 0, ("prefilling",): 0, ("decoding",): 0}
    shown = workers_by_state(bench.cluster.table)
    assert set(shown) == set(product(("prefill", "decode"), WORKER_STATES))
    assert (shown["prefill", "ready"], shown["decode", "ready"], shown["decode", "lost"]) == (1, 2, 0)
    bench.cluster.lose("d1")
    assert (workers_by_state(bench.cluster.table)["decode", "lost"], bench.cluster.table.entries[2].state) == (1, "lost")
