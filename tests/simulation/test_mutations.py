"""The simulation finds faults: with any one of the rules taken out of tandem, the invariant that it guards breaks soon."""

from __future__ import annotations

import random
import re

import pytest

from tests.simulation.mutations import MUTATIONS
from tests.simulation.runner import run
from tests.simulation.scenario import draw

MOST_RUNS = 200


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_rule_that_is_taken_away_is_missed(name: str) -> None:
    mutation = MUTATIONS[name]
    with mutation.plant():
        seeds = range(mutation.begin, mutation.begin + MOST_RUNS)
        violations = (violation for seed in seeds for violation in run(draw(random.Random(seed))).violations)
        assert any(re.search(mutation.breaks, violation) for violation in violations)
