"""A layout numbers every item once, in 64 bits, and believes no number of a peer unchecked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from tandem.cache.spec import CacheSpecs, ConvTailSpec, PagedKvSpec, RecurrentSpec
from tandem.errors import PeerRefused
from tests.transfer.helpers import CONV, KV, RECURRENT, SPECS, memory_of
from transfer.layout import CacheLayout, RegionGroup, group_tensors, layout_digest


@dataclass
class Wire:
    name: str
    kind: str
    layer: int
    address: int
    item_bytes: int
    num_items: int


def wire(layout: CacheLayout) -> list[Wire]:
    return [Wire(g.name, g.kind, g.layer, g.address, g.item_bytes, g.num_items) for g in layout.groups]


def test_groups_follow_the_layers_and_their_tensors() -> None:
    memory = memory_of()
    layout = CacheLayout.of(memory)
    assert [g.name for g in layout.groups] == [
        *("conv.0", "recurrent.0", "conv.1", "recurrent.1", "kv.2", "conv.3", "recurrent.3", "kv.4"),
    ]
    for group, tensor in zip(layout.groups, group_tensors(memory), strict=True):
        assert group.address == tensor.data_ptr()
        assert group.num_bytes == tensor.numel() * tensor.element_size()


def test_every_descriptor_is_the_address_of_its_item() -> None:
    memory = memory_of()
    layout = CacheLayout.of(memory)
    rows = layout.descriptors()
    assert rows.dtype == np.uint64
    for position, (group, tensor) in enumerate(zip(layout.groups, group_tensors(memory), strict=True)):
        for item in range(group.num_items):
            expected = [tensor[item].data_ptr(), group.item_bytes, 0]
            assert rows[layout.index(position, item)].tolist() == expected
    assert len({tuple(row) for row in rows.tolist()}) == len(rows)


def test_an_index_outside_its_group_is_refused_and_not_another_groups_item() -> None:
    layout = CacheLayout.of(memory_of(num_slots=4))
    for item in (-1, 4):
        with pytest.raises(ValueError, match=r"conv\.0"):
            layout.index(0, item)


def test_addresses_and_offsets_past_2_and_4_gib_do_not_wrap() -> None:
    item_bytes, num_items, base = 3 << 20, 4096, (1 << 47) - (1 << 35)
    layout = CacheLayout((RegionGroup("kv.0", "kv", 0, base, item_bytes, num_items),), "d")
    rows = layout.descriptors()
    for item in (0, 682, 683, 1365, 1366, 4095):
        assert int(rows[item, 0]) == base + item * item_bytes
    assert int(rows[4095, 0]) - base > 1 << 33


def test_an_address_in_the_upper_half_is_kept() -> None:
    base = (1 << 64) - (1 << 20)
    rows = CacheLayout((RegionGroup("kv.0", "kv", 0, base, 1 << 10, 1 << 10),), "d").descriptors()
    assert int(rows[-1, 0]) == base + 1023 * 1024


def test_more_items_than_an_index_can_number_are_refused() -> None:
    layout = CacheLayout((RegionGroup("kv.0", "kv", 0, 1 << 20, 1, 1 << 31),), "d")
    with pytest.raises(ValueError, match="more than one descriptor list"):
        _ = layout.firsts


def test_the_digest_ignores_addresses_and_pool_sizes() -> None:
    assert CacheLayout.of(memory_of(16, 4)).digest == CacheLayout.of(memory_of(3, 2)).digest


@pytest.mark.parametrize(
    "changed",
    [
        CacheSpecs((*SPECS.layers[:4], (replace(KV, dtype="float16"),))),
        CacheSpecs((*SPECS.layers[:4], (replace(KV, num_kv_heads=4, head_dim=2),))),
        CacheSpecs((*SPECS.layers[:4], (replace(KV, block_size_tokens=8, num_kv_heads=1),))),
        CacheSpecs(((replace(CONV, query_channels=2, value_channels=10), RECURRENT), *SPECS.layers[1:])),
        CacheSpecs(((replace(CONV, dtype="float16"), RECURRENT), *SPECS.layers[1:])),
        CacheSpecs(((CONV, replace(RECURRENT, key_dim=8, value_dim=2)), *SPECS.layers[1:])),
        CacheSpecs((SPECS.layers[2], *SPECS.layers[:2], *SPECS.layers[3:])),
        CacheSpecs(SPECS.layers[:4]),
    ],
    ids=["kv-dtype", "kv-shape", "block-size", "conv-cut", "conv-dtype", "state-shape", "order", "fewer-layers"],
)
def test_the_digest_differs_where_equal_bytes_would_mean_something_else(changed: CacheSpecs) -> None:
    assert layout_digest(changed) != layout_digest(SPECS)
    with pytest.raises(PeerRefused, match="cache layout"):
        CacheLayout.of(memory_of()).require_digest(layout_digest(changed))


def test_an_equal_digest_is_accepted() -> None:
    CacheLayout.of(memory_of()).require_digest(layout_digest(SPECS))


def test_a_true_layout_survives_the_wire() -> None:
    ours, theirs = CacheLayout.of(memory_of()), CacheLayout.of(memory_of(8, 2))
    assert CacheLayout.from_wire(wire(theirs), ours) == theirs


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "conv.9"),
        ("kind", "kv"),
        ("kind", "weights"),
        ("layer", 1),
        ("layer", -1),
        ("address", 0),
        ("address", -4096),
        ("address", (1 << 64) - 8),
        ("item_bytes", 0),
        ("item_bytes", 97),
        ("item_bytes", 1 << 63),
        ("num_items", 0),
        ("num_items", -3),
        ("num_items", 5),
        ("num_items", 1 << 63),
        ("num_items", True),
        ("num_items", 4.0),
        ("address", "4096"),
    ],
)
def test_a_group_with_an_impossible_or_different_number_is_refused(field: str, value: Any) -> None:
    ours = CacheLayout.of(memory_of())
    groups = wire(ours)
    setattr(groups[0], field, value)
    with pytest.raises(PeerRefused):
        CacheLayout.from_wire(groups, ours)


def test_overlapping_groups_are_refused() -> None:
    ours = CacheLayout.of(memory_of())
    groups = wire(ours)
    groups[4].address = groups[7].address + groups[7].item_bytes
    with pytest.raises(PeerRefused, match="overlap"):
        CacheLayout.from_wire(groups, ours)


def test_a_missing_group_is_refused() -> None:
    ours = CacheLayout.of(memory_of())
    with pytest.raises(PeerRefused, match="7 cache regions"):
        CacheLayout.from_wire(wire(ours)[1:], ours)


def test_a_peer_whose_items_cannot_be_numbered_is_refused() -> None:
    ours = CacheLayout.of(memory_of())
    groups = wire(ours)
    for position, group in enumerate(g for g in groups if g.kind == "kv"):
        group.num_items = 1 << 30
        group.address = (position + 1) << 44
    with pytest.raises(PeerRefused, match="more cache items"):
        CacheLayout.from_wire(groups, ours)


def test_a_model_of_one_kind_of_layer_has_a_layout() -> None:
    only_kv = PagedKvSpec(1, 2, 4, "float32")
    only_state = (ConvTailSpec(1, 1, 1, 2, "float32"), RecurrentSpec(1, 1, 1))
    assert layout_digest(CacheSpecs(((only_kv,),))) != layout_digest(CacheSpecs((only_state,)))
