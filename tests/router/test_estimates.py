"""Estimates err towards the quick side, are forgotten, and spread those who are sent away."""

import pytest

from router.estimates import FirstTokens, QueuePace


def paced(gap_s: float, count: int = 8, start_s: float = 100.0) -> tuple[QueuePace, float]:
    """A queue that somebody always waited in, and from which one left every `gap_s`."""
    pace, now = QueuePace(), start_s
    pace.waiting(now)
    for _ in range(count):
        now += gap_s
        pace.left(now)
    return pace, now


def test_the_wait_is_the_gap_times_those_ahead() -> None:
    pace, now = paced(0.5)
    assert pace.wait_s(6, now) == pytest.approx(3.0)
    assert pace.wait_s(0, now) == 0.0


def test_little_or_old_knowledge_is_none() -> None:
    pace, now = paced(0.5, count=3)
    assert pace.wait_s(6, now) == 0.0
    pace, now = paced(0.5)
    assert pace.wait_s(6, now + 31) == 0.0


def test_placements_that_nobody_waited_for_are_no_measure() -> None:
    pace = QueuePace()
    for now in (10.0, 19.0, 28.0, 37.0, 46.0):
        pace.left(now)
    assert pace.wait_s(5, 46.0) == 0.0
    pace.waiting(50.0)
    pace.left(50.5)
    pace.empty()
    pace.left(60.0)
    assert pace.retry_after_s(60.0) == pytest.approx(0.5)


def test_the_hint_follows_the_pace_at_which_places_become_free() -> None:
    quick, now = paced(0.2)
    slow, later = paced(3.0)
    assert quick.retry_after_s(now) == pytest.approx(0.2)
    assert slow.retry_after_s(later) == pytest.approx(3.0)


def test_each_refused_client_is_told_a_later_time_up_to_a_bound() -> None:
    pace, now = paced(2.0)
    hints = [pace.retry_after_s(now) for _ in range(100)]
    assert hints[:3] == pytest.approx([2.0, 4.0, 6.0])
    assert max(hints) == 60.0
    assert pace.retry_after_s(now + 200) == pytest.approx(1.0)  # all is forgotten by then


def test_the_least_time_to_a_first_token_is_that_of_the_quickest() -> None:
    seen = FirstTokens()
    for seconds in (0.9, 0.4, 0.6):
        seen.note(100, seconds, now=10.0)
    assert seen.least_s(100, 10.0) == 0.0  # too few
    seen.note(1000, 4.5, now=10.0)
    assert seen.least_s(100, 10.0) == pytest.approx(0.4)
    assert seen.least_s(5000, 10.0) == pytest.approx(0.4)  # a longer one may be quicker: never estimated up
    assert seen.least_s(10, 10.0) == pytest.approx(0.04)
    assert seen.least_s(100, 41.0) == 0.0
