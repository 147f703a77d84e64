"""Wanted against real: what is started, what is stopped, and what people are told."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.reconcile import (
    LONGEST_BACKOFF_S,
    MOST_FAILURES,
    PoolView,
    StartFailures,
    WorkerState,
    WorkerView,
    after_failure,
    reconcile,
)

STARTING, READY, DRAINING, LOST = WorkerState.STARTING, WorkerState.READY, WorkerState.DRAINING, WorkerState.LOST

NONE = StartFailures()


def pool(wanted: int | None, offered: int, *states: WorkerState, failures: StartFailures = NONE) -> PoolView:
    return PoolView(wanted, offered, tuple(WorkerView(f"w-{n}", n, state) for n, state in enumerate(states)), failures)


def test_an_empty_pool_is_filled_to_the_wish() -> None:
    assert reconcile(pool(2, 3), 0).start == 2


def test_without_a_wish_every_offered_unit_gets_a_worker() -> None:
    plan = reconcile(pool(None, 3, READY), 0)
    assert (plan.wanted, plan.start) == (3, 2)


def test_more_wanted_than_offered_starts_what_fits_and_says_why() -> None:
    plan = reconcile(pool(3, 2, READY, READY), 0)
    assert (plan.start, plan.stop) == (0, ())
    assert plan.reason == "3 wanted, nodes offer 2 units"
    assert "nodes offer 1 unit" in reconcile(pool(2, 1, READY), 0).reason


def test_a_lost_worker_is_replaced_at_once() -> None:
    plan = reconcile(pool(2, 2, READY, LOST), 0)
    assert (plan.start, plan.reason) == (1, "1 to be started")


def test_a_draining_worker_holds_its_unit_until_it_is_gone() -> None:
    plan = reconcile(pool(1, 1, DRAINING), 0)
    assert plan.start == 0
    assert "1 draining" in plan.reason


def test_surplus_workers_that_serve_nobody_stop_first_then_the_youngest() -> None:
    assert reconcile(pool(1, 4, READY, READY, STARTING, READY), 0).stop == ("w-2", "w-3", "w-1")


def test_a_pool_as_wished_gives_no_reason() -> None:
    assert reconcile(pool(2, 5, READY, READY), 0) == reconcile(pool(2, 2, READY, READY), 9)
    assert reconcile(pool(2, 2, READY, READY), 0).reason == ""


def test_a_failed_start_waits_for_its_backoff() -> None:
    failures = after_failure(StartFailures(), "no memory", 10.0, hopeless=False)
    assert reconcile(pool(1, 1, failures=failures), 10.5).start == 0
    assert reconcile(pool(1, 1, failures=failures), 11.0).start == 1
    assert "no memory" in reconcile(pool(1, 1, failures=failures), 10.5).reason


def test_failed_starts_are_bounded_and_the_reason_is_kept() -> None:
    failures = StartFailures()
    for attempt in range(MOST_FAILURES):
        assert not failures.gave_up
        failures = after_failure(failures, f"reason {attempt}", 0.0, hopeless=False)
    plan = reconcile(pool(1, 1, failures=failures), 1e9)
    assert plan.start == 0
    assert plan.reason == f"gave up after {MOST_FAILURES} failed starts: reason {MOST_FAILURES - 1}"


def test_a_hopeless_failure_is_not_tried_again() -> None:
    failures = after_failure(StartFailures(), "config.json is missing", 0.0, hopeless=True)
    assert reconcile(pool(1, 1, failures=failures), 1e9).start == 0
    assert reconcile(pool(1, 1, failures=failures), 0).reason == "gave up after 1 failed start: config.json is missing"


def retiring(wanted: int, offered: int, *states: WorkerState, failures: StartFailures = NONE) -> PoolView:
    """The first of them retires."""
    workers = [WorkerView(f"w-{n}", n, state, retiring=n == 0) for n, state in enumerate(states)]
    return PoolView(wanted, offered, tuple(workers), failures)


def test_one_that_retires_serves_until_another_is_ready_where_a_unit_is_free() -> None:
    assert reconcile(retiring(1, 2, READY), 0).start == 1
    assert reconcile(retiring(1, 2, READY), 0).stop == ()
    assert reconcile(retiring(1, 2, READY, STARTING), 0).stop == ()
    assert reconcile(retiring(1, 2, READY, READY), 0).stop == ("w-0",)


def test_one_that_retires_makes_room_where_no_unit_is_free() -> None:
    assert reconcile(retiring(2, 2, READY, READY), 0).stop == ("w-0",)
    assert reconcile(retiring(2, 2, READY, DRAINING), 0).stop == ()
    assert reconcile(retiring(2, 2, READY, STARTING), 0).stop == ()


def test_one_that_retires_goes_first_when_the_pool_shrinks() -> None:
    assert reconcile(retiring(1, 3, READY, READY, READY), 0).stop == ("w-0", "w-2")
    assert reconcile(retiring(0, 3, READY, STARTING), 0).stop == ("w-0", "w-1")


def test_nothing_retires_while_newcomers_fail() -> None:
    failures = after_failure(StartFailures(), "no memory", 10.0, hopeless=True)
    for offered in (1, 2):
        plan = reconcile(retiring(1, offered, READY, failures=failures), 1e9)
        assert (plan.start, plan.stop) == (0, ())
        assert "1 to be replaced" in plan.reason


@given(st.integers(1, 60))
def test_the_backoff_never_grows_past_its_limit(count: int) -> None:
    failures = after_failure(StartFailures(count), "x", 5.0, hopeless=False)
    assert 5.0 < failures.retry_at_s <= 5.0 + LONGEST_BACKOFF_S


@given(
    wanted=st.none() | st.integers(0, 6),
    offered=st.integers(0, 6),
    states=st.lists(st.sampled_from(WorkerState), max_size=8),
)
def test_plans_respect_units_and_converge(wanted: int | None, offered: int, states: list[WorkerState]) -> None:
    before = pool(wanted, offered, *states)
    plan = reconcile(before, 0)
    active = sum(state in (STARTING, READY) for state in states)
    draining = states.count(DRAINING)
    assert plan.start == 0 or not plan.stop
    assert plan.start + active + draining <= max(offered, active + draining)
    assert all(worker.state in (STARTING, READY) for worker in before.workers if worker.worker_id in plan.stop)
    target = min(plan.wanted, offered)
    assert active + plan.start - len(plan.stop) <= max(target, 0)
    # When all that was begun has ended, nothing is left to do.
    after = reconcile(pool(wanted, offered, *[READY] * (active + plan.start - len(plan.stop))), 0)
    assert not after.stop
    assert draining or after.start == 0
    assert bool(after.reason) == (target != plan.wanted or after.start > 0)


@pytest.mark.parametrize("states", [(), (STARTING,), (LOST,)])
def test_a_pool_that_cannot_serve_yet_says_so(states: tuple[WorkerState, ...]) -> None:
    plan = reconcile(pool(1, 0, *states), 0)
    assert plan.reason
