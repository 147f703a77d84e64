import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefill_worker.scheduler import may_start_another, plan_chunks


@given(st.lists(st.integers(1, 3000), max_size=20), st.integers(1, 1024))
def test_a_step_never_exceeds_the_budget_and_never_idles_while_work_waits(remaining: list[int], budget: int) -> None:
    plans = plan_chunks(remaining, budget)
    assert sum(p.num_tokens for p in plans) == min(budget, sum(remaining))
    assert [p.index for p in plans] == list(range(len(plans)))
    assert all(p.is_last == (p.num_tokens == remaining[p.index]) for p in plans)
    assert all(p.is_last for p in plans[:-1])


def test_what_the_first_prompt_leaves_the_next_one_gets() -> None:
    plans = plan_chunks([100, 500, 50], 512)
    assert [(p.num_tokens, p.is_last) for p in plans] == [(100, True), (412, False)]


@pytest.mark.parametrize(("started", "expected"), [(0, True), (1023, True), (1024, False), (5000, False)])
def test_prompts_start_at_most_two_steps_ahead(started: int, expected: bool) -> None:
    assert may_start_another(started, 512) is expected
