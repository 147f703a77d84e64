"""The simulation finds faults: with any one of the rules taken out of tandem, the invariant that it guards breaks soon."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.simulation.mutations import MUTATIONS, Mutation
from tests.simulation.runner import run

MOST_SEEDS = 40


def violations(mutation: Mutation) -> Iterator[str]:
    for seed in range(MOST_SEEDS):
        yield from run(replace(mutation.scenario, seed=seed)).violations


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_rule_that_is_taken_away_is_missed(name: str) -> None:
    mutation = MUTATIONS[name]
    with mutation.plant():
        assert any(re.search(mutation.breaks, violation) for violation in violations(mutation))


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_same_scenario_is_right_with_the_rule(name: str) -> None:
    for seed in range(4):
        assert run(replace(MUTATIONS[name].scenario, seed=seed)).violations == ()
