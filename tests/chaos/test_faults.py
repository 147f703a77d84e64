"""The rules by which workers are harmed."""

import random

from tests.chaos.faults import FaultKind, choose

PASSING = {FaultKind.BLINK, FaultKind.SLOW}


def test_so_many_of_a_pool_stay_as_are_to_be_spared() -> None:
    rng = random.Random(1)
    for _ in range(200):
        fault = choose(rng, {"prefill": ["p1", "p2"], "decode": ["d1"]}, spare=1)
        assert fault is not None
        assert fault.role == "prefill"
        lone = choose(rng, {"prefill": ["p1"], "decode": ["d1"]}, spare=1)
        assert lone is not None
        assert lone.kind in PASSING


def test_nothing_is_done_where_nobody_is_healthy() -> None:
    assert choose(random.Random(1), {"prefill": [], "decode": []}, spare=1) is None


def test_without_anything_to_spare_the_last_worker_may_go() -> None:
    kinds = {choose(random.Random(seed), {"prefill": ["p1"], "decode": []}, spare=0).kind for seed in range(200)}  # type: ignore[union-attr]
    assert kinds == set(FaultKind)


def test_one_seed_gives_one_course_of_events() -> None:
    healthy = {"prefill": ["p1", "p2", "p3"], "decode": ["d1", "d2"]}
    first, second = ([choose(rng, healthy, 1) for _ in range(50)] for rng in (random.Random(3), random.Random(3)))
    assert first == second
