"""What the simulation has found: each the scenario in which it showed, over a few seeds, since chance decides the moment."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.simulation.mutations import MUTATIONS
from tests.simulation.runner import run
from tests.simulation.scenario import Ask, Cut, Kill, Scenario

SEEDS = range(12)


def in_a_row(number: int) -> tuple[Ask, ...]:
    """Small requests, a tenth of a second apart."""
    return tuple(Ask(0.1 * place, tuple(range(10 + place, 30)), 4) for place in range(1, number + 1))


CASES = {
    # It reached the decode worker after the news of the death, was granted, and nobody was left to release it.
    "a reservation arrives after its prefill worker was found dead": Scenario(
        seed=0,
        num_prefill=2,
        asks=in_a_row(5),
        acts=(Cut(0.05, ("prefill", 0), ("decode", 0), 3.0), Kill(0.5, "prefill", 0)),
    ),
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
