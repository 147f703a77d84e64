"""What workers publish leads a request to the worker that has computed most of it."""

from __future__ import annotations

import random
import statistics
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from router.placement import Need, Placement, Snapshot, WorkerView, place
from router.prefixes import PrefixDirectory, PrefixEntry
from tandem.cache.names import Prefix, child_name, short

BLOCK = 4


def prefix_of(tokens: list[int], block: int = BLOCK) -> Prefix:
    return Prefix.of("model", block, tokens)


def entry_of(tokens: list[int], block: int = BLOCK) -> PrefixEntry:
    """As a worker that keeps a state after these tokens would publish it."""
    prefix = prefix_of(tokens, block)
    full, rest = divmod(len(tokens), block)
    if rest == 0:
        return PrefixEntry(short(prefix.names[-1]), len(tokens))
    above = prefix.name_of(full)
    return PrefixEntry(short(child_name(above, tokens[full * block :])), len(tokens), short(above))


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from("abc"), st.lists(TOKENS, max_size=6)), TOKENS)
def test_a_hit_is_the_longest_published_prefix_before_the_last_token(
    held: dict[str, list[list[int]]], tokens: list[int]
) -> None:
    directory = PrefixDirectory()
    for worker_id, prefixes in held.items():
        directory.replace(worker_id, tuple(entry_of(prefix) for prefix in prefixes))
    want = {
        worker_id: max((len(p) for p in prefixes if len(p) < len(tokens) and tokens[: len(p)] == p), default=0)
        for worker_id, prefixes in held.items()
    }
    assert directory.hits(prefix_of(tokens)) == {worker_id: hit for worker_id, hit in want.items() if hit}
    for worker_id in held:
        directory.replace(worker_id, ())
    assert directory.is_empty
    assert (directory._full, directory._partial) == ({}, {})


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.lists(TOKENS, max_size=5)), max_size=6), TOKENS)
def test_what_a_worker_told_before_is_forgotten_and_what_it_tells_again_stays(
    told: list[tuple[str, list[list[int]]]], tokens: list[int]
) -> None:
    directory, fresh = PrefixDirectory(), PrefixDirectory()
    for worker_id, prefixes in told:
        directory.replace(worker_id, tuple(map(entry_of, prefixes)))
    for worker_id, prefixes in dict(told).items():
        fresh.replace(worker_id, tuple(map(entry_of, prefixes)))
    assert directory.hits(prefix_of(tokens)) == fresh.hits(prefix_of(tokens))
    assert (directory._full, directory._partial) == (fresh._full, fresh._partial)


def snapshot(directory: PrefixDirectory, queues: dict[str, int]) -> Snapshot:
    prefill = tuple(WorkerView(name, queue_tokens=tokens) for name, tokens in queues.items())
    return Snapshot(prefill, (WorkerView("d", kv_blocks_total=100, state_slots_total=4, block_size_tokens=BLOCK),), directory)


def test_affinity_gives_way_when_the_queue_outweighs_what_the_hit_saves() -> None:
    directory = PrefixDirectory()
    directory.replace("warm", (entry_of(list(range(40))),))
    need = Need("r", 60, prefix_of(list(range(50))))
    near = place(snapshot(directory, {"cold": 0, "warm": 39}), need)
    far = place(snapshot(directory, {"cold": 0, "warm": 41}), need)
    assert near == Placement("warm", "d", hit_tokens=40)
    assert far == Placement("cold", "d", hit_tokens=0)


def test_a_decode_worker_that_keeps_the_prompt_is_preferred_to_one_with_little_more_headroom() -> None:
    directory = PrefixDirectory()
    directory.replace("keeps", (entry_of(list(range(48))),))
    need = Need("r", 60, prefix_of(list(range(50))))

    def placed(used: int) -> str:
        decode = tuple(
            WorkerView(name, kv_blocks_used=blocks, kv_blocks_total=1000, state_slots_total=4, block_size_tokens=BLOCK)
            for name, blocks in (("keeps", used), ("other", 0))
        )
        decision = place(Snapshot((WorkerView("p"),), decode, directory), need)
        assert isinstance(decision, Placement)
        return decision.decode_id

    assert (placed(90), placed(100)) == ("keeps", "other")


def test_without_hits_equal_workers_share_requests_by_their_ids() -> None:
    queues = {f"p{i}": 0 for i in range(4)}
    chosen = {place(snapshot(PrefixDirectory(), queues), Need(f"r{i}", 60, prefix_of([1] * 50))) for i in range(40)}
    assert {c.prefill_id for c in chosen if isinstance(c, Placement)} == set(queues)


def test_a_decision_among_64_and_64_workers_takes_under_a_millisecond() -> None:
    rng = random.Random(1)
    directory = PrefixDirectory()
    conversations = [[rng.randrange(1000) for _ in range(rng.randrange(500, 4000))] for _ in range(300)]
    for i in range(64):
        held = [rng.choice(conversations) for _ in range(128)]
        directory.replace(f"p{i}", tuple({entry_of(tokens[: rng.randrange(1, len(tokens))], 32) for tokens in held}))
    prefill = tuple(WorkerView(f"p{i}", queue_tokens=rng.randrange(4000)) for i in range(64))
    decode = tuple(WorkerView(f"d{i}", kv_blocks_total=9000, state_slots_total=64, block_size_tokens=32) for i in range(64))
    view = Snapshot(prefill, decode, directory)
    times = []
    for number in range(200):
        prefix = prefix_of(rng.choice(conversations), 32)
        assert prefix.names  # computed once for each request, before it is placed
        started = time.thread_time()
        placed = place(view, Need(f"r{number}", 8000, prefix))
        times.append(time.thread_time() - started)
        assert isinstance(placed, Placement)
        assert placed.hit_tokens > 0
    assert statistics.median(times) < 1e-3
