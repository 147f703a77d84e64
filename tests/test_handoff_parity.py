"""Two prefill and two decode workers over real NIXL answer as one process does, token for token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc.aio
import pytest
import pytest_asyncio

from tandem.colocated import ColocatedEngine
from tandem.config import CacheConfig
from tandem.model.load import load_model
from tandem.parity import compare, edge_lengths, make_cases, make_crowd
from tandem.request import Request, SamplingParams, StopRules
from tests.local_cluster import RANDOM, LocalCluster, local_cluster, until

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module")
def reference() -> ColocatedEngine:
    return ColocatedEngine(load_model(RANDOM), CacheConfig(block_size_tokens=16), chunk_tokens=256, max_batch=1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[LocalCluster]:
    async with local_cluster(num_prefill=2, num_decode=2) as running:
        yield running


async def test_lengths_around_every_edge_greedy_and_sampled(cluster: LocalCluster, reference: ColocatedEngine) -> None:
    cases = make_cases(edge_lengths(block_size_tokens=16, chunk_tokens=64, longest=600), vocab_size=256, max_new_tokens=12)
    got = [(await cluster.generate(case)).tokens for case in cases]
    assert compare(cases, [reference.generate([case])[0] for case in cases], got) == []
    await cluster.until_whole()


async def test_a_crowd_at_once_over_more_requests_than_slots(cluster: LocalCluster, reference: ColocatedEngine) -> None:
    crowd = make_crowd(40, longest=400, vocab_size=256, max_new_tokens=16)
    answers = await asyncio.gather(*(cluster.generate(request) for request in crowd))
    assert compare(crowd, [reference.generate([request])[0] for request in crowd], [a.tokens for a in answers]) == []
    assert {a.finished.prefill_worker for a in answers} == {h.worker.worker_id for h in cluster.prefill}
    assert {a.finished.decode_worker for a in answers if a.finished.decode_worker} == {
        h.worker.worker_id for h in cluster.decode
    }
    await cluster.until_whole()


async def test_clients_that_leave_at_any_moment_leave_nothing_behind(cluster: LocalCluster) -> None:
    async def leave(number: int) -> None:
        request = Request(f"leaver-{number}", tuple(range(1, 200)), SamplingParams(), StopRules(500))
        task = asyncio.ensure_future(cluster.generate(request))
        await asyncio.sleep(number * 0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    await asyncio.gather(*(leave(number) for number in range(24)))
    await cluster.until_whole()


async def test_an_end_token_and_a_limit_of_one_are_each_delivered_once(
    cluster: LocalCluster, reference: ColocatedEngine
) -> None:
    request = Request("one", tuple(range(5, 60)), SamplingParams(), StopRules(1))
    answer = await cluster.generate(request)
    assert answer.tokens == reference.generate([request])[0]
    assert (answer.finished.finish_reason, answer.finished.decode_worker) == ("length", "")
    await cluster.until_whole()


async def test_the_lost_session_of_a_router_frees_its_requests(cluster: LocalCluster) -> None:
    request = Request("orphan", tuple(range(1, 100)), SamplingParams(), StopRules(4000))
    async with local_cluster() as other:
        task = asyncio.ensure_future(other.generate(request))
        await until(lambda: other.decode[0].worker.load().running == 1, 10)
        await other.stop_router()
        with pytest.raises(grpc.aio.AioRpcError):
            await task
        await other.until_whole()
