"""The simulated fleet: a seed repeats it, everybody is served, and what it reports is within what is possible."""

from bench.fleet import Fleet, Report, requests, simulate

SMALL = Fleet(num_prefill=3, num_decode=3, num_requests=150, num_prefixes=10)


def run(seed: int) -> Report:
    report = simulate(Fleet(3, 3, 150, 0.8, seed, num_prefixes=10))
    report.decision_us = report.naming_us = []  # this machine's, not the simulation's
    return report


def test_a_seed_repeats_every_moment_of_every_request() -> None:
    first = run(1)
    assert run(1) == first
    assert run(2).digest != first.digest


def test_all_are_served_and_prefixes_are_found() -> None:
    report = run(3)
    assert (report.refused, report.decisions >= 150) == (0, True)
    assert 0 < report.hit_rate < 0.9
    assert 0 < report.prefill_busy < 1
    assert report.prefill_imbalance >= 1
    assert report.token_s[0] > SMALL.costs.decode_step
    assert report.ttft_s["interactive"][0] > SMALL.costs.prefill_step


def test_the_same_fleet_gets_the_same_requests() -> None:
    assert list(requests(SMALL)) == list(requests(SMALL))


def test_more_load_gives_later_first_tokens() -> None:
    light, heavy = (simulate(Fleet(2, 2, 200, load, 1, num_prefixes=10)) for load in (0.2, 2.0))
    assert heavy.ttft_s["batch"][1] > light.ttft_s["batch"][1]
    assert heavy.prefill_busy > light.prefill_busy
