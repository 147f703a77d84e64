"""The autoscaler: grows on what is felt, shrinks on what would have sufficed, and decides nothing from nothing."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.autoscale import CONFIG, DAYS, fixed_sizes, simulate
from controller.autoscale import Decision, DecodeSample, Memory, PoolSample, PrefillSample, Sample, decide
from tandem.config import AutoscaleConfig, PoolLimits

LIMITS = PoolLimits(min=1, max=8, up_cooldown_s=30, down_after_s=300)
POLICY = AutoscaleConfig(enabled=True, prefill=LIMITS, decode=LIMITS)
EVERY_S = 5.0


def prefill(count: int, *, queue_s: float = 0.0, tokens: float = 0.0, busy: float = 0.6, age_s: float = 1.0) -> PoolSample:
    workers = [PrefillSample(f"prefill-{n}", age_s, queue_s, tokens, busy) for n in range(count)]
    return PoolSample("prefill", count, count, 8, workers)


def decode(count: int, *, kv: float = 0.5, slots: float = 0.5, step_s: float = 0.03) -> PoolSample:
    return PoolSample("decode", count, count, 8, [DecodeSample(f"decode-{n}", 1.0, kv, slots, step_s) for n in range(count)])


class Autoscaled:
    """A pool that becomes at once what is decided."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.now_s = 1000.0

    def look(self, pool: PoolSample) -> Decision:
        decision, self.memory = decide(pool, self.memory, POLICY, self.now_s)
        self.now_s += EVERY_S
        return decision

    def until_change(self, pool: PoolSample, most: int = 1000) -> Decision:
        for _ in range(most):
            if (decision := self.look(pool)).wanted is not None:
                return decision
        return decision


@pytest.mark.parametrize(
    ("pool", "said"),
    [
        (prefill(2, queue_s=3.0, busy=1.0), "the longest wait is 3.0 s, the target 1 s"),
        (prefill(2, tokens=30_000, busy=1.0), "30000 tokens wait for each worker, the target is 8192"),
        (prefill(2, busy=0.95), "workers are busy 95% of the time, the target is 80%"),
        (decode(2, kv=0.95), "95% of KV or state slots are in use, the target is 80%"),
        (decode(2, slots=0.95), "95% of KV or state slots are in use, the target is 80%"),
        (decode(2, step_s=0.08), "a step takes 80 ms, the target is 50 ms"),
    ],
)
def test_each_signal_lets_its_pool_grow_and_is_the_reason(pool: PoolSample, said: str) -> None:
    decision = Autoscaled().until_change(pool)
    assert decision.wanted is not None
    assert decision.wanted > 2
    assert said in decision.reason
    assert decision.reason.startswith(f"{pool.role} goes from 2 to {decision.wanted}")


def test_one_odd_sample_changes_nothing() -> None:
    pool = Autoscaled()
    for _ in range(50):
        assert pool.look(prefill(2, queue_s=9.0, busy=1.0)).wanted is None
        assert pool.look(prefill(2)).wanted is None


def test_it_grows_in_proportion_and_at_most_doubles() -> None:
    assert Autoscaled().until_change(decode(4, step_s=0.06)).wanted == 5
    assert Autoscaled().until_change(prefill(3, queue_s=100.0, busy=1.0)).wanted == 6


def test_prompts_that_wait_at_idle_workers_wait_for_something_else() -> None:
    assert Autoscaled().until_change(prefill(2, queue_s=100.0, tokens=1e6, busy=0.3), most=20).wanted is None


def test_it_shrinks_by_one_after_minutes_of_calm() -> None:
    pool = Autoscaled()
    begin_s = pool.now_s
    decision = pool.until_change(prefill(4, busy=0.2))
    assert decision.wanted == 3
    assert pool.now_s - begin_s >= LIMITS.down_after_s
    assert "one fewer would have done" in decision.reason


def test_a_moment_of_load_starts_the_wait_for_calm_again() -> None:
    pool = Autoscaled()
    for _ in range(10):
        for _ in range(int(LIMITS.down_after_s / EVERY_S) - 1):
            assert pool.look(prefill(4, busy=0.2)).wanted is None
        assert pool.look(prefill(4, busy=0.7)).wanted is None


def test_a_pool_that_had_to_grow_soon_after_it_shrank_waits_longer_from_then_on() -> None:
    pool = Autoscaled()
    pool.until_change(prefill(3, busy=0.2))
    pool.until_change(prefill(2, busy=1.0))
    begin_s = pool.now_s
    pool.until_change(prefill(3, busy=0.2))
    assert pool.now_s - begin_s >= 2 * LIMITS.down_after_s


@given(st.floats(0, 1), st.floats(0, 3), st.integers(2, 8))
def test_what_follows_a_step_down_is_no_step_up_while_the_load_is_the_same(busy: float, load: float, count: int) -> None:
    """busy: of a pool of `count`; the same work makes fewer workers busier."""
    pool = Autoscaled()
    decision = pool.until_change(prefill(count, busy=busy, queue_s=load if busy > 0.95 else 0.0), most=100)
    if decision.wanted == count - 1:
        after = pool.until_change(prefill(count - 1, busy=min(1.0, busy * count / (count - 1))), most=1000)
        assert after.wanted is None or after.wanted < count - 1


SPOILT = st.sampled_from([math.nan, math.inf, -math.inf, -1.0])


@given(st.integers(0, 3), SPOILT)
def test_nothing_is_decided_from_what_is_no_number(field: int, value: float) -> None:
    pool = Autoscaled()
    names = ("age_s", "queue_s", "queue_tokens", "busy")
    good = prefill(3, queue_s=50.0, busy=1.0)
    bad = replace(good, workers=[*good.workers[:2], replace(good.workers[2], **{names[field]: value})])  # type: ignore[arg-type]
    for _ in range(20):
        decision = pool.look(bad)
        assert decision.wanted is None
    assert "no number" in decision.reason


@pytest.mark.parametrize(
    ("pool", "said"),
    [
        (prefill(2, queue_s=50, busy=1.0, age_s=16.0), "what prefill-0 said is 16 s old"),
        (replace(prefill(2, queue_s=50, busy=1.0), ready=1), "1 of 2 are ready yet"),
        (replace(prefill(3, queue_s=50, busy=1.0), ready=4, wanted=3), "1 are on their way out"),
        (replace(prefill(1, queue_s=50, busy=1.0), ready=2, wanted=2), "1 of 2 workers gave no numbers"),
        (replace(prefill(0), wanted=0), "its size is set by hand"),
        (replace(prefill(2), wanted=None), "it follows what nodes offer"),
    ],
)
def test_nothing_is_decided_while_it_cannot_be_known(pool: PoolSample, said: str) -> None:
    decision = Autoscaled().until_change(pool, most=500)
    assert decision.wanted is None
    assert said in decision.reason


def test_stale_numbers_in_between_are_no_calm() -> None:
    pool = Autoscaled()
    for _ in range(200):
        for _ in range(30):
            assert pool.look(prefill(4, busy=0.2)).wanted is None
        assert pool.look(prefill(4, busy=0.2, age_s=99.0)).wanted is None


def test_limits_and_what_nodes_offer_bound_it() -> None:
    full = prefill(8, queue_s=9.0, busy=1.0)
    assert "the most there may be" in Autoscaled().until_change(full, most=10).reason
    few = replace(prefill(2, queue_s=9.0, busy=1.0), offered=2)
    assert Autoscaled().until_change(few, most=10).wanted is None
    assert Autoscaled().until_change(decode(1, kv=0.0, slots=0.0, step_s=0.0), most=500).wanted is None
    outside = replace(prefill(12), offered=20)
    assert Autoscaled().look(outside).wanted == 8


numbers = st.floats(0, 10) | SPOILT
workers: st.SearchStrategy[list[Sample]] = st.lists(
    st.builds(PrefillSample, st.just("w"), numbers, numbers, numbers, numbers), max_size=5
)


@given(workers, st.none() | st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
def test_every_decision_is_within_bounds_and_says_why(
    samples: list[Sample], wanted: int | None, ready: int, offered: int
) -> None:
    pool = PoolSample("prefill", wanted, ready, offered, samples)
    memory = Memory()
    for number in range(80):
        decision, memory = decide(pool, memory, POLICY, number * EVERY_S)
        assert decision.reason
        assert "\n" not in decision.reason
        assert decision.wanted is None or LIMITS.min <= decision.wanted <= LIMITS.max


# ---- whole days ----


@pytest.mark.parametrize("day", DAYS, ids=lambda day: day.name)
def test_a_day_is_held_for_less_than_its_peak_costs_and_without_oscillation(day) -> None:  # type: ignore[no-untyped-def]
    scaled = simulate(day, (2, 2), CONFIG, seed=1)
    peak = simulate(day, fixed_sizes(day, max), None, seed=1)
    assert scaled.worker_hours < 0.9 * peak.worker_hours
    assert scaled.in_time > (0.85 if day.name == "burst" else 0.98)
    assert scaled.reversals <= 2


def test_a_steady_load_is_left_alone() -> None:
    steady = replace(DAYS[0], rate=lambda t: 4.0)
    outcome = simulate(steady, (2, 2), CONFIG, seed=3)
    assert outcome.reversals == 0
    assert outcome.changes <= 4
    assert outcome.in_time > 0.98
