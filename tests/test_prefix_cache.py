"""Real workers over real NIXL: answers with the prefix cache on, off, and always evicting are those of one process."""

from __future__ import annotations

import asyncio
import itertools
import random
from dataclasses import replace

import pytest

from tandem.colocated import ColocatedEngine
from tandem.config import CacheConfig, PrefillConfig
from tandem.model.load import load_model
from tandem.request import Request, SamplingParams, StopRules
from tests.local_cluster import RANDOM, SMALL, Answer, LocalCluster, local_cluster, until

pytestmark = [pytest.mark.slow, pytest.mark.asyncio]

NUM_CONVERSATIONS = 5
NUM_TURNS = 3
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, seed=7)
PREFILL = PrefillConfig(chunk_tokens=64, checkpoint_every_tokens=64)


class Reference:
    """One process. Each request is computed once for all tests."""

    def __init__(self) -> None:
        loaded = load_model(RANDOM)
        self.slot_gib = loaded.model.cache_specs(16).slot_bytes / 2**30
        self._engine = ColocatedEngine(loaded, CacheConfig(block_size_tokens=16), chunk_tokens=256, max_batch=1)
        self._known: dict[tuple[tuple[int, ...], SamplingParams, int], list[int]] = {}

    def answer(self, request: Request) -> list[int]:
        key = (request.prompt, request.sampling, request.stop.max_new_tokens)
        if key not in self._known:
            self._known[key] = self._engine.generate([request])[0]
        return self._known[key]


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


def first_turn(number: int) -> tuple[int, ...]:
    """All conversations begin alike, and part inside a block."""
    rng = random.Random(number)
    return (*range(1, 74), *(rng.randrange(256) for _ in range(rng.randrange(10, 120))))


async def converse(cluster: LocalCluster, number: int) -> list[tuple[Request, Answer]]:
    """The prompts grow by the answers and by what the user says next."""
    rng = random.Random(1000 + number)
    prompt, turns = first_turn(number), []
    for turn in range(NUM_TURNS):
        sampling = SAMPLED if number % 2 else SamplingParams()
        request = Request(f"conversation-{number}-{turn}", prompt, sampling, StopRules(8))
        answer = await cluster.generate(request)
        turns.append((request, answer))
        prompt = (*prompt, *answer.tokens, *(rng.randrange(256) for _ in range(rng.randrange(1, 60))))
    return turns


@pytest.mark.parametrize("budget", ["off", "roomy", "evicting"])
async def test_answers_do_not_depend_on_what_is_found(budget: str, reference: Reference) -> None:
    # With two states for five conversations at once, what one left is gone at its next turn.
    gib = {"off": 0.0, "roomy": 200 * reference.slot_gib, "evicting": 2.5 * reference.slot_gib}[budget]
    cache = replace(SMALL.cache, prefix_gib=gib)
    async with local_cluster(num_prefill=1, num_decode=2, config=replace(SMALL, cache=cache, prefill=PREFILL)) as cluster:
        talks = await asyncio.gather(*(converse(cluster, number) for number in range(NUM_CONVERSATIONS)))
        await cluster.until_whole()
    for request, answer in (turn for talk in talks for turn in talk):
        assert answer.tokens == reference.answer(request), request.request_id
    hits = [[answer.finished.usage.cached_tokens for _, answer in talk] for talk in talks]
    if budget == "off":
        assert sum(map(sum, hits)) == 0
    if budget == "roomy":
        for talk in talks:
            for (before, _), (_, answer) in itertools.pairwise(talk):
                assert answer.finished.usage.cached_tokens >= len(before.prompt)


async def test_a_conversation_returns_to_the_worker_that_knows_it() -> None:
    async with local_cluster(num_prefill=2, num_decode=1, config=replace(SMALL, prefill=PREFILL)) as cluster:
        talks = [await converse(cluster, number) for number in range(3)]
        await cluster.until_whole()
    for talk in talks:
        assert len({answer.finished.prefill_worker for _, answer in talk}) == 1
        assert all(answer.finished.usage.cached_tokens for _, answer in talk[1:])


async def test_the_next_turn_finds_the_answer_too(reference: Reference) -> None:
    prompt = tuple(range(1, 101))
    async with local_cluster(config=replace(SMALL, prefill=PREFILL)) as cluster:
        first = await cluster.generate(Request("first", prompt, SamplingParams(), StopRules(20)))
        said = (*prompt, *first.tokens)
        known = cluster.prefill[0].worker.load
        await until(lambda: len(said) in known().prefixes.num_tokens, 10)
        request = Request("second", (*said, 7, 8, 9), SamplingParams(), StopRules(8))
        second = await cluster.generate(request)
        assert second.tokens == reference.answer(request)
        assert second.finished.usage.cached_tokens == len(said)
        await cluster.until_whole()


async def test_clients_that_leave_a_shared_prefix_leave_it_whole(reference: Reference) -> None:
    prompt = tuple(range(1, 200))
    cache = replace(SMALL.cache, prefix_gib=3.5 * reference.slot_gib)
    async with local_cluster(config=replace(SMALL, cache=cache, prefill=PREFILL)) as cluster:

        async def leave(number: int) -> None:
            request = Request(f"leaver-{number}", (*prompt, number), SamplingParams(), StopRules(400))
            task = asyncio.ensure_future(cluster.generate(request))
            await asyncio.sleep(number * 0.02)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        await asyncio.gather(*(leave(number) for number in range(16)))
        await cluster.until_whole()
        request = Request("stays", (*prompt, 3, 4), SamplingParams(), StopRules(8))
        answer = await cluster.generate(request)
        assert answer.tokens == reference.answer(request)
        await cluster.until_whole()
