"""Real pools are scaled, drained and replaced, and their controller is killed, while streams run: none breaks, none changes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import psutil
import pytest

from bench.rolling import drain, replace, scale
from bench.up import UpCluster, up_cluster, words_of
from tandem.v1 import operations_pb2
from tests.chaos.cases import Case, make_cases
from tests.chaos.load import Load, ask

pytestmark = [pytest.mark.chaos, pytest.mark.cluster, pytest.mark.slow]

STREAMS = 8
BACK_S = 60.0


@pytest.fixture
async def cluster() -> AsyncIterator[UpCluster]:
    settings: dict[str, object] = {"router": {"queue_wait_s": 120.0}}
    async with up_cluster("--memory-gib", "0.3", "--max-prefill", "2", "--max-decode", "3", settings=settings) as cluster:
        yield cluster


async def test_operations_under_load_break_no_stream_and_touch_one_pool(cluster: UpCluster) -> None:
    cases = await asyncio.to_thread(make_cases, 16, 5)
    load = Load(cluster.stub, cases, STREAMS)
    prefill = await pids(cluster, "prefill")
    await scale(cluster, "decode", 2)
    await drain(cluster, "decode")
    await kill_controller(cluster)
    await scale(cluster, "decode", 1)  # by the controller's next life
    assert await pids(cluster, "prefill") == prefill
    decode = await pids(cluster, "decode")
    await replace(cluster, "prefill")
    assert await pids(cluster, "decode") == decode
    await load.stop()
    assert [record.wrong for record in load.records if record.wrong] == []
    assert load.failures == {}
    assert len(load.records) > STREAMS
    kinds = {event.kind for event in (await cluster.status()).events}
    assert kinds >= {"scaled", "ready", "draining", "drained", "replaced", "resumed"}
    await from_nothing(cluster, cases[0])
    await cluster.until_whole()


async def from_nothing(cluster: UpCluster, case: Case) -> None:
    """A request that comes while there is no worker waits for one."""
    await scale(cluster, "decode", 0)
    waiting = asyncio.create_task(ask(cluster.stub, case))
    await cluster.until(lambda status: sum(status.requests.values()) == 1, 10.0)
    assert (await cluster.status()).pools["decode"].reason == ""
    await scale(cluster, "decode", 1)
    record = await waiting
    assert (record.status, record.wrong) == (None, "")


async def pids(cluster: UpCluster, role: str) -> set[int]:
    return {worker.pid for worker in await cluster.workers(role)}


async def kill_controller(cluster: UpCluster) -> None:
    """Its workers are the same afterwards, under the same ids."""
    before = {worker.id: worker.pid for worker in await cluster.workers()}
    children = psutil.Process(cluster.process.pid).children(recursive=True)
    (controller,) = [process for process in children if "ControllerActor" in " ".join(words_of(process))]
    os.kill(controller.pid, signal.SIGKILL)
    await cluster.until(has_come_back, BACK_S)
    assert {worker.id: worker.pid for worker in await cluster.workers()} == before


def has_come_back(status: operations_pb2.Status) -> bool:
    return any(event.kind == "resumed" for event in status.events)
