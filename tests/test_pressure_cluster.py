"""A whole cluster whose decode worker has too little memory for all that it let in: router, NIXL and gRPC are real."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tandem.colocated import ColocatedEngine
from tandem.config import CacheConfig, DecodeConfig
from tandem.model.load import load_model
from tandem.parity import compare
from tandem.request import Request, SamplingParams, StopRules
from tests.local_cluster import RANDOM, SMALL, local_cluster

pytestmark = [pytest.mark.slow, pytest.mark.asyncio]

BLOCK, LONGEST, NUM_SLOTS, NUM_BLOCKS = 16, 256, 8, 28
NUM_REQUESTS = 8
MOST_ROUNDS = 5


def ask(number: int) -> Request:
    sampling = SamplingParams(0.9, seed=number) if number % 2 else SamplingParams()
    prompt = tuple((number + 7 * place) % 256 for place in range(20 + 5 * number))
    return Request(f"r{number}", prompt, sampling, StopRules(120))


@pytest.mark.parametrize("way", ["host", "prefill"])
async def test_answers_that_outgrow_the_memory_are_those_of_one_process(way: str) -> None:
    source = replace(RANDOM, max_context_tokens=LONGEST)
    loaded = load_model(source)
    specs = loaded.model.cache_specs(BLOCK)
    budget = NUM_BLOCKS * specs.block_bytes + NUM_SLOTS * specs.slot_bytes
    config = replace(
        SMALL,
        model=source,
        cache=CacheConfig(block_size_tokens=BLOCK, budget_bytes=budget, max_sequences=NUM_SLOTS),
        decode=DecodeConfig(overcommit=4.0, swap_gib=1.0 if way == "host" else 0.0, local_prefill_tokens=0),
    )
    requests = [ask(number) for number in range(NUM_REQUESTS)]
    async with local_cluster(config=config) as cluster:
        for _ in range(MOST_ROUNDS):  # how many run at once depends on the machine
            answers = await asyncio.gather(*(cluster.generate(request, timeout_s=60.0) for request in requests))
            evictions = cluster.decode[0].worker.load().evictions
            if evictions[way]:
                break
        await cluster.until_whole()
    assert evictions[way] > 0
    alone = ColocatedEngine(loaded, CacheConfig(block_size_tokens=BLOCK), chunk_tokens=256, max_batch=1)
    assert compare(requests, [alone.generate([r])[0] for r in requests], [a.tokens for a in answers]) == []
