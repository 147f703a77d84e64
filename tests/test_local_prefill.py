"""A prompt computed on the decode worker gives the answer of one that was shipped, to the last bit. Real workers, real NIXL."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
import pytest_asyncio

import router.placement
from tandem.config import CacheConfig, DecodeConfig, PrefillConfig
from tandem.parity import message_of
from tandem.request import OutputOptions, Request, SamplingParams, StopRules
from tandem.v1 import inference_pb2 as pb
from tests.local_cluster import SMALL, LocalCluster, local_cluster, until

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

TILE = 256
LIMIT = 300
CONFIG = replace(
    SMALL,
    # A prefix that is found is computed in other tiles than one that is not.
    cache=CacheConfig(budget_bytes=64 << 20, max_sequences=8, block_size_tokens=16, prefix_gib=0.0),
    prefill=PrefillConfig(chunk_tokens=512),
    decode=DecodeConfig(local_prefill_tokens=LIMIT),
)
SAMPLED = SamplingParams(0.9, top_p=0.95, seed=11, presence_penalty=0.3, repetition_penalty=1.1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[LocalCluster]:
    async with local_cluster(config=CONFIG) as running:
        yield running


@contextmanager
def computed(where: str) -> Iterator[None]:
    """Whatever may be computed on a decode worker is, or nothing is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(router.placement, "is_local_better", lambda shipped, local: where == "local")
        yield


@dataclass(frozen=True)
class Told:
    tokens: tuple[int, ...]
    logprobs: tuple[bytes, ...]
    finished: pb.Finished


async def ask(cluster: LocalCluster, message: pb.GenerateRequest) -> Told:
    tokens: list[int] = []
    logprobs: list[bytes] = []
    finished = pb.Finished()
    async for response in cluster.stub.Generate(message, timeout=30.0):
        tokens += response.token_ids
        logprobs += [entry.SerializeToString(deterministic=True) for entry in (*response.logprobs, *response.prompt.logprobs)]
        finished = response.finished if response.HasField("finished") else finished
    return Told(tuple(tokens), tuple(sorted(logprobs)), finished)


async def both(cluster: LocalCluster, message: pb.GenerateRequest) -> tuple[Told, Told]:
    """Computed on the decode worker, and shipped."""
    told = []
    for where in ("local", "shipped"):
        with computed(where):
            told.append(await ask(cluster, message))
    local, shipped = told
    decode_id = cluster.decode[0].worker.worker_id
    assert local.finished.prefill_worker == decode_id
    assert shipped.finished.prefill_worker == cluster.prefill[0].worker.worker_id
    return local, shipped


@pytest.mark.parametrize("length", [1, 2, 8, 9, 31, 33, TILE - 1, TILE, TILE + 1, LIMIT])
@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "seeded"])
async def test_tokens_and_logprobs_are_those_of_the_usual_way(
    cluster: LocalCluster, length: int, sampling: SamplingParams
) -> None:
    prompt = tuple(random.Random(length).choices(range(256), k=length))
    options = OutputOptions(3, 2)
    local, shipped = await both(cluster, message_of(Request("r", prompt, sampling, StopRules(6), output=options)))
    assert len(local.tokens) == 6
    assert len(local.logprobs) == 6 + length - 1
    assert (local.tokens, local.logprobs) == (shipped.tokens, shipped.logprobs)
    await cluster.until_whole()


async def test_a_grammar_holds_from_the_first_token_on(cluster: LocalCluster) -> None:
    message = pb.GenerateRequest(text="say it: ", regex="[a-c]{3}-[0-9]+x", max_new_tokens=12)
    local, shipped = await both(cluster, message)
    assert local.tokens == shipped.tokens
    assert bytes(local.tokens[:3]).decode().strip("abc") == ""


async def test_an_answer_of_one_token_and_one_ended_by_its_first_token(cluster: LocalCluster) -> None:
    prompt = tuple(range(20))
    one = message_of(Request("one", prompt, SamplingParams(), StopRules(1)))
    local, shipped = await both(cluster, one)
    assert local.tokens == shipped.tokens
    stopped = message_of(Request("stop", prompt, SamplingParams(), StopRules(9, frozenset(local.tokens))))
    local, shipped = await both(cluster, stopped)
    assert (local.tokens, local.finished.finish_reason) == (shipped.tokens, "stop")
    await cluster.until_whole()


async def test_the_timeline_shows_no_hand_off_and_the_prefill_worker_nothing(cluster: LocalCluster) -> None:
    before = cluster.prefill[0].worker.load().busy_seconds
    with computed("local"):
        told = await ask(cluster, message_of(Request("t", tuple(range(30)), SamplingParams(), StopRules(5))))
    timings = told.finished.timings
    assert timings.handoff_exposed == 0.0
    assert 0.0 < timings.prefill <= timings.ttft <= timings.total
    assert cluster.prefill[0].worker.load().busy_seconds == before


async def test_a_crowd_beside_running_streams_gets_the_same_tokens(cluster: LocalCluster) -> None:
    prompts = [tuple(random.Random(i).choices(range(256), k=1 + 7 * i)) for i in range(20)]
    ways = (SamplingParams(), SAMPLED)
    crowd = [Request(f"c{i}", prompt, ways[i % 2], StopRules(9)) for i, prompt in enumerate(prompts)]
    with computed("shipped"):
        expected = [(await ask(cluster, message_of(request))).tokens for request in crowd]
    with computed("local"):
        got = await asyncio.gather(*(ask(cluster, message_of(request)) for request in crowd))
    assert [told.tokens for told in got] == expected
    assert any(told.finished.prefill_worker == cluster.decode[0].worker.worker_id for told in got)
    await cluster.until_whole()


async def test_clients_that_leave_at_any_moment_leave_nothing_behind(cluster: LocalCluster) -> None:
    async def leave(number: int) -> None:
        request = Request(f"leaver-{number}", tuple(range(200)), SamplingParams(), StopRules(400))
        task = asyncio.ensure_future(cluster.generate(request))
        await asyncio.sleep(number * 0.005)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    with computed("local"):
        await asyncio.gather(*(leave(number) for number in range(24)))
    await cluster.until_whole()


async def test_a_decode_worker_that_drains_hands_its_prompts_over_to_the_other() -> None:
    async with local_cluster(num_decode=2, config=CONFIG) as cluster:
        request = Request("drained", tuple(range(40)), SamplingParams(), StopRules(300))
        with computed("local"):
            expected = (await cluster.generate(request)).tokens
            asking = asyncio.ensure_future(cluster.generate(request))
            await until(lambda: any(host.worker.load().running for host in cluster.decode), 10.0)
            (busy,) = [host for host in cluster.decode if host.worker.load().running]
            await busy.drain(0.0)
            answer = await asking
        assert answer.tokens == expected
        assert answer.finished.decode_worker != busy.worker.worker_id
        await cluster.until_whole()
