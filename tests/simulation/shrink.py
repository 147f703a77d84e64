"""A failing scenario, made smaller: fewer clients, fewer mishaps, fewer faults."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from tests.simulation.scenario import Scenario
from transfer.fake_agent import Faults

__all__ = ["shrunk"]


def shrunk(scenario: Scenario, fails: Callable[[Scenario], bool]) -> Scenario:
    """The first that still fails and of which no smaller one does."""
    while True:
        smaller = next((candidate for candidate in _smaller(scenario) if fails(candidate)), None)
        if smaller is None:
            return scenario
        scenario = smaller


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    for name in ("acts", "asks"):
        things = getattr(scenario, name)
        for place in range(len(things)):
            yield dataclasses.replace(scenario, **{name: things[:place] + things[place + 1 :]})
    nothing = Faults()
    if scenario.faults != nothing:
        yield dataclasses.replace(scenario, faults=nothing)
    for field in dataclasses.fields(Faults):
        calm = getattr(nothing, field.name)
        if field.name not in ("hang_s", "late_s") and getattr(scenario.faults, field.name) != calm:
            yield dataclasses.replace(scenario, faults=dataclasses.replace(scenario.faults, **{field.name: calm}))
    if scenario.checkpoints:
        yield dataclasses.replace(scenario, checkpoints=0)
    for name in ("num_prefill", "num_decode"):
        if getattr(scenario, name) > 1:
            yield dataclasses.replace(scenario, **{name: getattr(scenario, name) - 1})
