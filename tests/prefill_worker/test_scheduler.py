from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefill_worker.scheduler import (
    ChunkPlan,
    PrefillPolicy,
    Work,
    may_begin,
    num_tokens_within_step,
    plan_step,
    plan_within_step,
)
from tandem.request import ServiceClass

INTERACTIVE, BATCH = ServiceClass.INTERACTIVE, ServiceClass.BATCH
POLICY = PrefillPolicy(chunk_tokens=512)
TILED = PrefillPolicy(chunk_tokens=512, tile_tokens=256)


def work(
    remaining: int, *, computed: int = 0, stop: int | None = None, waited: int = 0, kind: ServiceClass = INTERACTIVE
) -> Work:
    return Work(computed, remaining, remaining if stop is None else stop, service_class=kind)


def planned(works: Sequence[Work], policy: PrefillPolicy = POLICY) -> list[tuple[int, int, bool]]:
    return [(chunk.index, chunk.num_tokens, chunk.is_last) for chunk in plan_step(works, policy).chunks]


WORKS = st.lists(
    st.builds(
        lambda computed, remaining, stop, waited, kind: Work(computed, remaining, min(stop, remaining), waited, kind),
        st.integers(0, 3000),
        st.integers(1, 3000),
        st.integers(1, 3000),
        st.integers(0, 10_000),
        st.sampled_from(ServiceClass),
    ),
    max_size=12,
)


@given(WORKS, st.integers(1, 1024), st.sampled_from([1, 32, 256]), st.floats(0, 1024))
def test_a_step_keeps_to_its_budget_and_is_empty_only_without_work(
    works: list[Work], budget: int, tile_tokens: int, credit: float
) -> None:
    plan = plan_step(works, PrefillPolicy(budget, tile_tokens), credit)
    assert bool(plan.chunks) == bool(works)
    assert sum(chunk.num_tokens for chunk in plan.chunks) <= budget
    assert len({chunk.index for chunk in plan.chunks}) == len(plan.chunks)
    for chunk in plan.chunks:
        asked = works[chunk.index]
        assert 1 <= chunk.num_tokens <= min(asked.num_remaining, asked.num_to_stop)
        assert chunk.is_last == (chunk.num_tokens == asked.num_remaining)
    assert 0 <= plan.batch_credit <= budget


@given(WORKS, st.integers(1, 1024))
def test_without_tiles_no_token_of_the_budget_is_left_while_somebody_could_use_it(works: list[Work], budget: int) -> None:
    usable = sum(min(w.num_remaining, w.num_to_stop) for w in works)
    assert sum(chunk.num_tokens for chunk in plan_step(works, PrefillPolicy(budget)).chunks) == min(budget, usable)


@given(WORKS, st.integers(256, 1024))
def test_a_chunk_that_the_budget_cuts_ends_where_a_tile_ends(works: list[Work], budget: int) -> None:
    for chunk in plan_step(works, PrefillPolicy(budget, 256)).chunks:
        asked = works[chunk.index]
        if chunk.num_tokens < min(asked.num_remaining, asked.num_to_stop):
            assert (asked.num_computed + chunk.num_tokens) % 256 == 0


def test_the_shortest_remaining_work_goes_first_and_what_it_leaves_the_next_one_gets() -> None:
    assert planned([work(500), work(100), work(50)]) == [(2, 50, True), (1, 100, True), (0, 362, False)]


def test_a_chunk_stops_where_the_state_is_to_be_kept() -> None:
    assert planned([work(500, stop=64), work(600)]) == [(0, 64, False), (1, 448, False)]


def test_a_prompt_that_cannot_end_at_a_tile_leaves_the_rest_to_a_smaller_one() -> None:
    assert planned([work(300), work(5000), work(5200, stop=40)], TILED) == [(0, 300, True), (2, 40, False)]


def test_budgets_below_a_tile_are_used_all_the_same() -> None:
    assert planned([work(1000, computed=100)], PrefillPolicy(100, 256)) == [(0, 100, False)]


@dataclass
class Stream:
    """A worker that computes one long prompt beside a stream of short ones, which alone would fill it."""

    policy: PrefillPolicy
    computed: int = 0

    def tokens_until_done(self, length: int, short: int) -> int:
        long, credit = work(length), 0.0
        while True:
            works = [replace(long, waited_tokens=self.computed), *(work(short) for _ in range(8))]
            plan = plan_step(works, self.policy, credit)
            credit = plan.batch_credit
            for chunk in plan.chunks:
                self.computed += chunk.num_tokens
                if chunk.index == 0:
                    long = replace(
                        long,
                        num_computed=long.num_computed + chunk.num_tokens,
                        num_remaining=long.num_remaining - chunk.num_tokens,
                        num_to_stop=long.num_remaining - chunk.num_tokens,
                    )
            if not long.num_remaining:
                return self.computed


@pytest.mark.parametrize("length", [600, 4000, 100_000])
def test_a_long_prompt_is_passed_for_a_bounded_time_only(length: int) -> None:
    # After length / ageing tokens for others, nothing new passes it; then it needs its own.
    assert Stream(POLICY).tokens_until_done(length, short=200) <= length / POLICY.ageing + length + 2 * 512


def test_interactive_goes_first_and_batch_gets_what_is_left() -> None:
    works = [work(10, kind=BATCH), work(500), work(5000, kind=BATCH)]
    assert planned(works, TILED) == [(1, 500, True), (0, 10, True)]


def test_batch_gets_its_share_and_no_more_while_interactive_work_would_fill_every_step() -> None:
    credit, done = 0.0, 0
    for _ in range(100):
        plan = plan_step([work(10**6), work(10**6, kind=BATCH)], TILED, credit)
        credit = plan.batch_credit
        done += sum(chunk.num_tokens for chunk in plan.chunks if chunk.index == 1)
    assert 0.08 * 100 * 512 <= done <= 0.1 * 100 * 512


@pytest.mark.parametrize(("begun", "expected"), [(0, True), (1023, True), (1024, False), (5000, False)])
def test_prompts_begin_at_most_two_steps_ahead(begun: int, expected: bool) -> None:
    assert may_begin(work(5000), [work(begun)] if begun else [], POLICY) is expected


def test_a_short_prompt_begins_beside_a_long_one_and_not_the_other_way_round() -> None:
    assert may_begin(work(100), [work(50_000)], POLICY)
    assert not may_begin(work(60_000), [work(50_000)], POLICY)


def test_batch_work_holds_up_no_interactive_prompt_and_one_batch_prompt_always_begins() -> None:
    flood = [work(5000, kind=BATCH), work(5000, kind=BATCH)]
    assert may_begin(work(9000), flood, POLICY)
    assert may_begin(work(9000, kind=BATCH), [work(9000)], POLICY)
    assert not may_begin(work(9000, kind=BATCH), [work(9000), work(100, kind=BATCH)], POLICY)


def test_plans_are_values() -> None:
    assert plan_step([work(10)], POLICY).chunks == (ChunkPlan(0, 10, True),)


def test_within_a_step_interactive_prompts_alone_are_computed_in_order_and_within_the_rest() -> None:
    works = [work(700, kind=BATCH), work(300), work(40)]
    assert [(c.index, c.num_tokens) for c in plan_within_step(works, POLICY, 10_000)] == [(2, 40), (1, 300)]
    assert [(c.index, c.num_tokens) for c in plan_within_step(works, POLICY, 100)] == [(2, 40), (1, 60)]
    assert plan_within_step(works[:1], POLICY, 10_000) == ()
    assert plan_within_step([work(2000)], TILED, 255) == ()  # no chunk ends within a tile for want of a rest


def test_a_batch_step_is_its_share_of_what_is_computed_until_it_ends() -> None:
    policy = PrefillPolicy(chunk_tokens=512, batch_share=0.25)
    assert num_tokens_within_step(100, policy) == pytest.approx(300)
    assert num_tokens_within_step(100, PrefillPolicy(chunk_tokens=512, batch_share=0.0)) == float("inf")
