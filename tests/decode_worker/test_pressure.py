"""Sequences that outgrow the memory: each answer is what it would have been alone, everybody gets on, and nothing is lost."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_worker.inbox import CancelSequence, HandOver
from decode_worker.scheduler import Way
from decode_worker.sequence import VerifiedSequence
from tandem.cache.budget import PoolSizes
from tandem.cache.memory import CacheMemory
from tandem.cache.pool import IndexPool
from tandem.colocated import ColocatedEngine
from tandem.config import CacheConfig, DecodeConfig
from tandem.engine import Engine
from tandem.errors import NoRoom
from tandem.model.load import LoadedModel
from tandem.parity import make_crowd
from tandem.request import Request, SamplingParams, ServiceClass, StopRules
from tests.decode_worker.pressure import EPOCH, Job, Pair
from tests.model.variants import VARIANTS, make
from tests.simulation.engine import BLOCK, DigestEngine, reference
from transfer.lease_state import LeaseState

OVERCOMMITTED = DecodeConfig(overcommit=8.0, swap_gib=1.0, max_batch=16)
# Copies are taken for free, so eviction to host memory is always cheaper; without host memory it is never possible.
BOTH_WAYS = pytest.mark.parametrize("swap_gib", [1.0, 0.0], ids=["host memory", "prefill again"])


def request(name: str, prompt: int = 5, max_new_tokens: int = 20, **kind: object) -> Request:
    tokens = tuple((7 * place + len(name)) % 64 for place in range(prompt))
    return Request(name, tokens, SamplingParams(), StopRules(max_new_tokens), **kind)  # type: ignore[arg-type]


def wanted(asked: Request) -> list[int]:
    return list(itertools.islice(reference(asked), asked.stop.max_new_tokens))


def pair(num_blocks: int = 12, num_slots: int = 4, config: DecodeConfig = OVERCOMMITTED) -> Pair:
    return Pair(DigestEngine(num_blocks, num_slots), config)


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 50), st.booleans()), min_size=1, max_size=14),
    spare_blocks=st.integers(0, 12),
    num_slots=st.integers(1, 6),
    overcommit=st.sampled_from([1.0, 1.5, 3.0, 100.0]),
    copies=st.sampled_from([0, 1, 3, 1000]),
    max_batch=st.integers(1, 8),
    seed=st.none() | st.integers(0, 2**64 - 1),
    beginnings=st.sampled_from([1, 2, 100]),
    keep_prefixes=st.booleans(),
)
def test_whatever_the_pools_every_answer_is_right_and_ends(
    lengths: list[tuple[int, int, bool]],
    spare_blocks: int,
    num_slots: int,
    overcommit: float,
    copies: int,
    max_batch: int,
    seed: int | None,
    beginnings: int,
    keep_prefixes: bool,
) -> None:
    """The pool holds the longest request and little more. copies: of short sequences, that host memory has room for.
    beginnings: so many prompts differ from each other; the others go on where one of them ends."""
    sampling = SamplingParams() if seed is None else SamplingParams(0.9, seed=seed)
    requests = [
        Request(str(i), prompt_of(i % beginnings, prompt), sampling, StopRules(new), kind_of(is_batch))
        for i, (prompt, new, is_batch) in enumerate(lengths)
    ]
    num_blocks = max(-(-r.max_total_tokens // BLOCK) for r in requests) + spare_blocks
    engine = DigestEngine(num_blocks, num_slots)
    swap_gib = copies * (engine.memory.specs.slot_bytes + 3 * engine.memory.specs.block_bytes) / 2**30
    config = DecodeConfig(max_batch=max_batch, overcommit=overcommit, swap_gib=swap_gib, keep_prefixes=keep_prefixes)
    it = Pair(engine, config)
    jobs = it.run(requests)
    assert [job.tokens for job in jobs] == [wanted(r) for r in requests]
    assert all(job.attempt <= 2 for job in jobs), "somebody was sent through prefill again twice"
    assert it.most_running <= max_batch
    if overcommit == 1.0:
        assert it.evictions.total() == 0


def prompt_of(start: int, num_tokens: int) -> tuple[int, ...]:
    return tuple((start + 3 * place) % 64 for place in range(num_tokens))


def kind_of(is_batch: bool) -> ServiceClass:
    return ServiceClass.BATCH if is_batch else ServiceClass.INTERACTIVE


@BOTH_WAYS
def test_more_run_at_once_than_could_if_all_grew_to_the_end(swap_gib: float) -> None:
    requests = [request(str(i), prompt=6, max_new_tokens=30) for i in range(4)]
    config = DecodeConfig(overcommit=8.0, swap_gib=swap_gib)
    it = pair(num_blocks=14, config=config)
    jobs = it.run(requests)
    assert it.most_running == 4
    assert set(+it.evictions) == ({Way.HOST} if swap_gib else {Way.PREFILL})
    assert [job.tokens for job in jobs] == [wanted(r) for r in requests]


def begin(it: Pair, asked: Request) -> Job:
    job = Job(asked)
    assert it._begin(job)
    return job


def until_evicted(it: Pair) -> None:
    while not it.evictions.total():
        it.turn()


def test_who_waits_in_host_memory_comes_back_before_anybody_new_begins() -> None:
    it = pair(num_blocks=6)
    first, second = begin(it, request("first", 6, 12)), begin(it, request("second", 6, 12))
    until_evicted(it)
    assert it.leases.counts_by_state()["swapped"] == 1
    with pytest.raises(NoRoom, match="evicted sequences come back first"):
        it.leases.reserve(request("new", 1, 1), 1, "router", "prefill-1")
    turns = 0
    while it.leases.counts_by_state()["swapped"]:
        it.turn()
        turns += 1
    assert turns > 1
    assert it.leases.find("second", 1).state is LeaseState.RUNNING  # type: ignore[union-attr]
    assert it.leases.find("first", 1) is None  # it had to end first
    assert first.request.request_id != second.request.request_id


def test_what_was_verified_before_the_eviction_waits_until_the_evicted_is_back_or_nothing_runs() -> None:
    it = pair(num_blocks=9, config=DecodeConfig(overcommit=8.0, swap_gib=1.0, max_joins_per_step=1, max_batch=2))
    for name in ("a", "b", "c"):
        begin(it, request(name, 6, 20))
    until_evicted(it)
    order: list[str] = []
    while it.leases.all_live():
        it.turn()
        order += [s.lease.request.request_id for s in it.loop._running if s.lease.request.request_id not in order]
    assert order == ["a", "b", "c"]


@BOTH_WAYS
def test_a_sequence_alone_that_lacks_a_block_gives_way_to_those_that_hold_the_memory(swap_gib: float) -> None:
    """The others were reserved and are not handed over yet; nothing may wait for ever, whichever ends first."""
    it = pair(num_blocks=8, config=DecodeConfig(overcommit=100.0, swap_gib=swap_gib))
    alone = begin(it, request("alone", 6, 20))
    held = it.leases.reserve(request("held", 14, 14), 1, "router", "prefill-1")
    until_evicted(it)
    for _ in range(3):
        it.turn()
    assert it.loop._running == []
    first = it.prefill(held.request, held)
    it.loop.inbox.put(VerifiedSequence(it.leases.verified(held.id, EPOCH), 14, first))
    while it.leases.find("held", 1):
        it.turn()
    told = [t for event in it.take_events() for t in event.tokens if t.request_id == "held"]
    assert [first, *(t.tokens[0] for t in told)] == wanted(held.request)
    if swap_gib:
        while it.leases.all_live():
            it.turn()
    assert it.is_whole
    assert alone.attempt == 1


def test_a_client_that_leaves_while_its_sequence_is_away_leaves_nothing() -> None:
    it = pair(num_blocks=6)
    begin(it, request("a", 6, 12))
    begin(it, request("b", 6, 12))
    until_evicted(it)
    (away,) = [lease for lease in it.leases.all_live() if lease.state is LeaseState.SWAPPED]
    it.loop.inbox.put(CancelSequence(away.key))
    it.turn()
    assert it.loop._residency.num_away == 0
    assert "evicted to host memory" in it.leases.get(away.id, EPOCH).story
    it.loop.inbox.put(HandOver())
    it.turn()
    assert it.is_whole


def test_a_worker_that_leaves_hands_over_what_is_away_too() -> None:
    it = pair(num_blocks=6)
    begin(it, request("a", 6, 12))
    begin(it, request("b", 6, 12))
    until_evicted(it)
    it.take_events()
    it.loop.inbox.put(HandOver())
    it.turn()
    assert {(f.request_id, f.kind) for event in it.take_events() for f in event.failed} == {("a", "Leaving"), ("b", "Leaving")}
    assert it.is_whole


def test_a_sequence_that_ends_in_a_step_is_not_evicted_for_the_next() -> None:
    """It has left before memory is looked for."""
    it = pair(num_blocks=6)
    begin(it, request("long", 6, 8))
    begin(it, request("short", 6, 7))  # ends in the step after which "long" needs a fourth block; each holds three
    while it.leases.all_live():
        it.turn()
    assert it.evictions.total() == 0
    assert it.is_whole


def test_the_load_tells_what_a_reservation_would_find() -> None:
    it = pair(num_blocks=20)
    begin(it, request("a", 6, 31))  # 2 blocks of prompt, 9 in all: 1 of 7 is expected
    load = it.loop.load()
    assert (load.kv_blocks_used, load.kv_blocks_counted, load.overcommit) == (2, 3, 8.0)
    assert dict(load.evictions) == {"host": 0, "prefill": 0}


# ---- with a model ----

NUM_CONCURRENT = 64
NUM_BLOCKS, NUM_SLOTS, BLOCK_TOKENS = 24, 8, 4


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return make(tmp_path_factory.mktemp("checkpoint") / "model", VARIANTS["equal heads"]).loaded


def small_engine(
    model: LoadedModel, num_blocks: int = NUM_BLOCKS, num_slots: int = NUM_SLOTS, block_tokens: int = BLOCK_TOKENS
) -> Engine:
    specs = model.model.cache_specs(block_tokens)
    memory = CacheMemory.allocate(specs, PoolSizes(num_blocks, num_slots))
    pools = IndexPool(num_blocks, "KV blocks"), IndexPool(num_slots, "state slots")
    return Engine(model, memory, *pools, "cpu")


@pytest.fixture(scope="module")
def crowd() -> list[Request]:
    """Greedy and seeded, long and short."""
    requests = make_crowd(NUM_CONCURRENT, longest=40, vocab_size=96, max_new_tokens=40)
    assert {r.sampling.temperature > 0 for r in requests} == {True, False}
    return requests


@pytest.fixture(scope="module")
def alone(loaded: LoadedModel, crowd: list[Request]) -> list[list[int]]:
    engine = ColocatedEngine(loaded, CacheConfig(block_size_tokens=BLOCK_TOKENS), chunk_tokens=64, max_batch=1)
    return [engine.generate([r])[0] for r in crowd]


@pytest.mark.slow
@BOTH_WAYS
def test_64_concurrent_requests_in_pools_that_evict_all_the_time_give_the_reference_tokens(
    loaded: LoadedModel, crowd: list[Request], alone: list[list[int]], swap_gib: float
) -> None:
    it = Pair(small_engine(loaded), DecodeConfig(overcommit=100.0, swap_gib=swap_gib), chunk_tokens=64)
    jobs = it.run(crowd)
    assert [job.tokens for job in jobs] == alone
    assert it.evictions[Way.HOST if swap_gib else Way.PREFILL] > NUM_CONCURRENT // 3


def brief(number: int, longest_prompt: int, answers: tuple[int, ...]) -> Request:
    """Greedy or seeded, so short that a sequence holds a few positions only."""
    prompt = tuple((11 * number + 5 * place) % 96 for place in range(1 + number % longest_prompt))
    sampling = SamplingParams(0.9, seed=number) if number % 2 else SamplingParams()
    return Request(f"brief-{number}", prompt, sampling, StopRules(answers[number % len(answers)]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("swap_gib", "num_blocks", "longest_prompt", "answers", "share"),
    [(0.0, 16, 4, (3,), 0.5), (1.0, 12, 2, (7, 8), 0.4)],
    ids=["prefill again", "host memory"],
)
def test_64_requests_of_which_somebody_gives_way_in_most_steps_give_the_reference_tokens(
    loaded: LoadedModel, swap_gib: float, num_blocks: int, longest_prompt: int, answers: tuple[int, ...], share: float
) -> None:
    """Blocks of one token, so that everybody needs one at every step. From host memory at most every second step can evict:
    whoever comes back is let make a step first, one comes back in a step, and nobody new begins meanwhile."""
    requests = [brief(number, longest_prompt, answers) for number in range(NUM_CONCURRENT)]
    engine = small_engine(loaded, num_blocks, NUM_CONCURRENT, block_tokens=1)
    it = Pair(engine, DecodeConfig(overcommit=100.0, swap_gib=swap_gib))
    jobs = it.run(requests)
    reference = ColocatedEngine(loaded, CacheConfig(block_size_tokens=BLOCK_TOKENS), chunk_tokens=64, max_batch=1)
    assert [job.tokens for job in jobs] == [reference.generate([r])[0] for r in requests]
    assert it.num_evicting > share * it.num_steps
    assert set(+it.evictions) == {Way.HOST if swap_gib else Way.PREFILL}
