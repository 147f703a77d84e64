"""A missing index is told once, with its history, and counted."""

import logging

import pytest

from tandem.cache.watch import PoolWatch
from tandem.clock import FakeClock


def test_each_missing_index_is_told_once_for_as_long_as_it_is_missing(caplog: pytest.LogCaptureFixture) -> None:
    watch = PoolWatch(lambda name: f"{name} was with lease L", FakeClock())
    for missing in ([], ["block 3"], ["block 3"], ["block 3", "slot 1"], [], ["block 3"]):
        watch.look(missing)
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert [error.split(": ")[1] for error in errors] == [
        "block 3 is missing; block 3 was with lease L",
        "slot 1 is missing; slot 1 was with lease L",
        "block 3 is missing; block 3 was with lease L",
    ]
    assert watch.num_missing == 3


def test_pools_that_stay_as_they_are_are_looked_at_seldom() -> None:
    clock, looks = FakeClock(), 0
    watch = PoolWatch(str, clock)

    def missing() -> list[str]:
        nonlocal looks
        looks += 1
        return []

    for standing in (1, 1, 2, 2):
        watch.look_if_due(standing, missing)
    assert looks == 2
    clock.advance(60.0)
    watch.look_if_due(2, missing)
    assert looks == 3
