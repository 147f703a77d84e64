"""What the simulation has found: each the scenario in which it showed, over a few seeds, since chance decides the moment."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.simulation.mutations import MUTATIONS
from tests.simulation.runner import run
from tests.simulation.scenario import Scenario

SEEDS = range(12)


CASES = {
    # It reached the decode worker after the news of the death, was granted, and nobody was left to release it.
    "a reservation arrives after its prefill worker was found dead": MUTATIONS["the dead are heard"].scenario,
    # The decode worker knew of no such lease, forgot the cancel, granted one, and computed the answer for nobody.
    "a cancel passes the reservation that it is for": MUTATIONS["early cancels are forgotten"].scenario,
}
FAULTS = {
    "a reservation arrives after its prefill worker was found dead": "the dead are heard",
    "a cancel passes the reservation that it is for": "early cancels are forgotten",
}
"""The rule whose absence each case shows."""


def with_seeds(scenario: Scenario) -> list[Scenario]:
    return [replace(scenario, seed=seed) for seed in SEEDS]


@pytest.mark.parametrize("case", CASES)
def test_what_was_found_once_stays_mended(case: str) -> None:
    for scenario in with_seeds(CASES[case]):
        assert (scenario.seed, run(scenario).violations) == (scenario.seed, ())


@pytest.mark.parametrize("case", FAULTS)
def test_the_case_still_shows_the_fault(case: str) -> None:
    with MUTATIONS[FAULTS[case]].plant():
        assert any(run(scenario).violations for scenario in with_seeds(CASES[case]))
