"""Whatever happens to a cluster: streams are right or end with one clear error, no memory is written by two, nothing leaks.

The invariants stand in `runner`, `clients` and `watch`; here is only how many runs are made, and of which scenarios.
"""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from tests.simulation.runner import run
from tests.simulation.scenario import draw

BATCH = 100
NUM_SEEDED = 1300
NUM_DRAWN = 700


@pytest.mark.parametrize("first", range(0, NUM_SEEDED, BATCH))
def test_no_interleaving_breaks_an_invariant(first: int) -> None:
    for seed in range(first, first + BATCH):
        assert (seed, run(draw(random.Random(seed))).violations) == (seed, ())
    gc.collect()


@settings(
    max_examples=NUM_DRAWN,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)
@given(st.randoms(use_true_random=False))
def test_no_scenario_of_hypothesis_breaks_an_invariant(chance: random.Random) -> None:
    scenario = draw(chance)
    note(repr(scenario))
    assert run(scenario).violations == ()


def test_a_run_is_a_function_of_its_seed() -> None:
    for seed in range(8):
        scenario = draw(random.Random(seed))
        assert run(scenario) == run(scenario)


@pytest.mark.slow
def test_a_run_is_the_same_in_another_process() -> None:
    code = "import random; from tests.simulation.runner import run; from tests.simulation.scenario import draw\n"
    code += "print([run(draw(random.Random(seed))) for seed in range(8)])"
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    told = subprocess.run([sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True, check=True)
    assert told.stdout.strip() == str([run(draw(random.Random(seed))) for seed in range(8)])
