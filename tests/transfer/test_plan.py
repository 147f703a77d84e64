"""Whatever the order of the pushes, every byte of a sequence goes exactly once, and to its own place."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.errors import HandoffRefused
from tests.transfer.helpers import BLOCK, SPECS, SPECS_STATE_LAYERS, memory_of
from transfer.layout import CacheLayout, RegionGroup
from transfer.plan import Coverage, Part, TransferPlan

LOCAL = CacheLayout.of(memory_of(16, 4))
REMOTE = CacheLayout.of(memory_of(20, 5))
KV_LAYERS = (2, 4)


def plan_of(
    local_blocks: list[int], remote_blocks: list[int], slots: tuple[int, int] = (1, 3), num_held: int = 0
) -> TransferPlan:
    return TransferPlan.build(LOCAL, REMOTE, (local_blocks, remote_blocks), slots, num_held)


def named(layout: CacheLayout, index: int) -> tuple[str, int]:
    """(group, item) behind a descriptor index."""
    position = max(i for i, first in enumerate(layout.firsts) if first <= index)
    return layout.groups[position].name, index - layout.firsts[position]


def pairs(parts: list[Part]) -> list[tuple[tuple[str, int], tuple[str, int]]]:
    return [
        (named(LOCAL, local), named(REMOTE, remote))
        for part in parts
        for local, remote in zip(part.local.tolist(), part.remote.tolist(), strict=True)
    ]


@settings(max_examples=150, deadline=None)
@given(
    num_positions=st.integers(1, 16 * BLOCK),
    seed=st.integers(0, 2**32),
    chunk=st.integers(1, 40),
    by_layer=st.booleans(),
    num_held=st.integers(0, 16),
)
def test_for_any_chunking_the_parts_cover_everything_once(
    num_positions: int, seed: int, chunk: int, by_layer: bool, num_held: int
) -> None:
    """Everything but the blocks that are held already."""
    num_held = min(num_held, num_positions // BLOCK)
    chance = random.Random(seed)
    num_blocks = SPECS.blocks_for(num_positions)
    local = chance.sample(range(16), num_blocks)
    remote = chance.sample(range(20), min(20, num_blocks + chance.randrange(3)))
    plan = plan_of(local, remote, num_held=num_held)
    coverage = Coverage(plan)
    parts: list[Part] = []
    done = 0
    for end in range(chunk, num_positions, chunk):
        full = end // BLOCK
        for layers in [[layer] for layer in KV_LAYERS] if by_layer else [None]:
            parts += coverage.kv(layers, done, full)
        done = full
    parts += [coverage.state(layer) for layer in SPECS_STATE_LAYERS if chance.random() < 0.5]
    parts += coverage.rest(num_blocks)

    sent = range(num_held, num_blocks)
    expected = [((f"kv.{layer}", local[i]), (f"kv.{layer}", remote[i])) for layer in KV_LAYERS for i in sent]
    expected += [
        ((f"{kind}.{layer}", 1), (f"{kind}.{layer}", 3)) for layer in SPECS_STATE_LAYERS for kind in ("conv", "recurrent")
    ]
    assert sorted(pairs(parts)) == sorted(expected)
    assert sum(part.num_bytes for part in parts if part.kind == "kv") == plan.kv_bytes(num_blocks)
    assert plan.kv_bytes(num_blocks) + plan.held_bytes(num_blocks) == num_blocks * SPECS.block_bytes
    assert sum(part.num_bytes for part in parts if part.kind == "state") == SPECS.slot_bytes
    assert all(part.local.dtype == part.remote.dtype == np.int32 for part in parts)


def test_bytes_of_a_part_are_those_of_its_descriptors() -> None:
    coverage = Coverage(plan_of([4, 2, 0], [7, 8, 9]))
    rows = LOCAL.descriptors()
    for part in coverage.rest(3):
        assert part.num_bytes == int(rows[part.local, 1].sum())


def test_a_block_is_never_pushed_twice() -> None:
    coverage = Coverage(plan_of([0, 1, 2], [3, 4, 5]))
    list(coverage.kv([2], 0, 2))
    with pytest.raises(ValueError, match="pushed before"):
        coverage.kv(None, 1, 3)
    # The failed push took nothing: layer 4 is still whole.
    assert sum(len(part.local) for part in coverage.kv([4], 0, 3)) == 3


def test_a_state_is_never_pushed_twice() -> None:
    coverage = Coverage(plan_of([0], [0]))
    coverage.state(1)
    with pytest.raises(ValueError, match="layer 1"):
        coverage.state(1)


@pytest.mark.parametrize(("layers", "start", "stop"), [([0], 0, 1), (None, 0, 4), (None, -1, 1), (None, 2, 1), ([9], 0, 1)])
def test_a_push_outside_the_plan_is_refused(layers: list[int] | None, start: int, stop: int) -> None:
    with pytest.raises(ValueError, match=r"blocks|layer"):
        Coverage(plan_of([0, 1, 2], [3, 4, 5])).kv(layers, start, stop)


def test_a_pushed_block_past_the_end_of_the_sequence_is_refused() -> None:
    coverage = Coverage(plan_of([0, 1, 2], [3, 4, 5]))
    list(coverage.kv(None, 0, 3))
    with pytest.raises(ValueError, match="past the first 2"):
        coverage.rest(2)


@pytest.mark.parametrize(
    ("blocks", "slot", "field"),
    [
        ([0, 1], 3, "block_ids"),
        ([0, 1, 20], 3, "block_ids"),
        ([0, 1, -1], 3, "block_ids"),
        ([0, 1, 1], 3, "block_ids"),
        ([0, 1, 2], 5, "slot"),
    ],
    ids=["too-few", "past-the-end", "negative", "twice", "slot"],
)
def test_an_impossible_grant_is_refused_by_name(blocks: list[int], slot: int, field: str) -> None:
    with pytest.raises(HandoffRefused) as caught:
        plan_of([3, 4, 5], blocks, (1, slot))
    assert caught.value.field == field


def test_wrong_local_indices_are_the_callers_mistake() -> None:
    with pytest.raises(ValueError, match="local slot"):
        plan_of([0], [0], (4, 0))


def test_plans_between_different_layouts_do_not_exist() -> None:
    with pytest.raises(ValueError, match="equal layouts"):
        TransferPlan.build(LOCAL, CacheLayout(REMOTE.groups, "other"), ([0], [0]), (0, 0))


def test_indices_and_bytes_hold_for_a_cache_of_hundreds_of_gibibytes() -> None:
    num_blocks, block_bytes = 2_000_000, 131_072
    groups = tuple(RegionGroup(f"kv.{i}", "kv", i, (i + 1) << 40, block_bytes, num_blocks) for i in range(2))
    layout = CacheLayout(groups, "d")
    last = num_blocks - 1
    plan = TransferPlan.build(layout, layout, ([last], [last - 1]), (0, 0))
    part = plan.kv(1, np.arange(1))
    rows = layout.descriptors()
    assert int(rows[part.local[0], 0]) == (2 << 40) + last * block_bytes
    assert int(rows[part.remote[0], 0]) == (2 << 40) + (last - 1) * block_bytes
    assert plan.kv_bytes(num_blocks) == 2 * num_blocks * block_bytes > 1 << 38
