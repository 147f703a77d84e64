"""The rules of the decode batch, over any numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_worker.scheduler import Candidate, Costs, Way, choose_victim, may_return, num_joins
from tandem.rate import Rate

CANDIDATES = st.lists(st.builds(Candidate, st.integers(1, 10_000), st.integers(1, 1 << 30), st.booleans()), max_size=8)
COSTS = st.builds(Costs, st.floats(1e6, 1e11), st.floats(1.0, 1e6))


@pytest.mark.parametrize(
    ("verified", "running", "expected"),
    [(0, 5, 0), (3, 0, 3), (20, 0, 8), (20, 60, 4), (20, 64, 0), (20, 70, 0)],
)
def test_joins_are_bounded_per_step_and_by_the_batch(verified: int, running: int, expected: int) -> None:
    assert num_joins(verified, running, 0, max_batch=64, max_joins_per_step=8) == expected


@given(st.integers(0, 99), st.integers(0, 99), st.integers(1, 9))
def test_nobody_joins_before_the_evicted_are_back_unless_nothing_runs(verified: int, running: int, away: int) -> None:
    joins = num_joins(verified, running, away, max_batch=64, max_joins_per_step=8)
    assert joins == (0 if running else min(1, verified))


@given(CANDIDATES, COSTS, st.integers(0, 1 << 31))
def test_the_victim_is_the_cheapest_to_bring_back_of_those_that_can_be(
    candidates: list[Candidate], costs: Costs, free_host_bytes: int
) -> None:
    chosen = choose_victim(candidates, costs, free_host_bytes)

    def can(candidate: Candidate, way: Way) -> bool:
        return candidate.can_resume if way is Way.PREFILL else candidate.num_bytes <= free_host_bytes

    possible = [(costs.seconds(c, way), i) for i, c in enumerate(candidates) for way in Way if can(c, way)]
    if chosen is None:
        assert possible == []
        return
    victim = candidates[chosen.index]
    assert can(victim, chosen.way)
    least = min(seconds for seconds, _ in possible)
    assert costs.seconds(victim, chosen.way) == least
    assert chosen.index == max(i for seconds, i in possible if seconds == least), "among equals the last that came"


@given(CANDIDATES, COSTS, st.integers(0, 1 << 31))
def test_there_is_a_victim_whenever_one_may_go_through_prefill_again(
    candidates: list[Candidate], costs: Costs, free_host_bytes: int
) -> None:
    if any(candidate.can_resume for candidate in candidates):
        assert choose_victim(candidates, costs, free_host_bytes) is not None


def test_the_cheaper_way_is_taken_by_bytes_and_by_time() -> None:
    short = Candidate(num_tokens=50, num_bytes=150 << 20, can_resume=True)
    long = Candidate(num_tokens=8192, num_bytes=660 << 20, can_resume=True)
    slow_host, fast_host = Costs(1e9, 5000.0), Costs(20e9, 5000.0)
    assert choose_victim([short], slow_host, 1 << 40).way is Way.PREFILL  # type: ignore[union-attr]
    assert choose_victim([long], slow_host, 1 << 40).way is Way.HOST  # type: ignore[union-attr]
    assert choose_victim([long], slow_host, 600 << 20).way is Way.PREFILL  # type: ignore[union-attr]
    assert choose_victim([short], fast_host, 1 << 40).way is Way.PREFILL  # type: ignore[union-attr]
    assert choose_victim([long, short], fast_host, 1 << 40).index == 1  # type: ignore[union-attr]


@given(st.integers(0, 50), st.integers(0, 8), st.integers(0, 60), st.integers(0, 2))
def test_who_comes_back_leaves_a_block_for_each_that_runs(needed: int, running: int, free_blocks: int, free_slots: int) -> None:
    if may_return(needed, running, free_blocks, free_slots):
        assert free_blocks - needed >= running
        assert free_slots >= 1
    elif free_slots:
        assert free_blocks < needed + running


def test_what_fits_an_empty_worker_comes_back_to_it() -> None:
    assert may_return(10, 0, 10, 1)


def test_a_rate_follows_what_was_seen_lately_and_ignores_what_took_no_time() -> None:
    rate = Rate(assumed=7.0)
    rate.note(100.0, 0.0)
    assert rate.per_s == 7.0
    rate.note(100.0, 1.0)
    assert rate.per_s == pytest.approx(100.0)
    for _ in range(60):
        rate.note(50.0, 1.0)
    assert rate.per_s == pytest.approx(50.0, rel=0.01)
