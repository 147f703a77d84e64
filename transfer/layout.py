"""Where the items of a worker's caches lie in memory, and how they are numbered for one-sided writes. Pure arithmetic.

A *group* is one tensor of `CacheMemory`: the KV blocks of one attention layer (`kv.3`), or one cache kind of one DeltaNet
layer over all slots (`conv.0`, `recurrent.0`). An *item* is one block or one slot of a group. Every item of every group is
one *descriptor*; a writer and a reader of equal layout number them alike, so a write is two lists of descriptor indices.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tandem.cache.memory import CacheMemory
from tandem.cache.spec import CacheSpecs, ConvTailSpec, PagedKvSpec, RecurrentSpec
from tandem.errors import PeerRefused

__all__ = ["LAYOUT_VERSION", "CacheLayout", "Kind", "RegionGroup", "WireGroup", "group_tensors", "layout_digest"]

LAYOUT_VERSION = 1
_ADDRESS_LIMIT = 1 << 64
# The transfer library takes descriptor indices (not offsets) as int32.
_MAX_DESCRIPTORS = (1 << 31) - 1

Kind = Literal["kv", "state"]


class WireGroup(Protocol):
    """A group as it comes from a peer: nothing in it may be believed before it was checked."""

    name: str
    kind: str
    layer: int
    address: int
    item_bytes: int
    num_items: int


@dataclass(frozen=True, slots=True)
class RegionGroup:
    """One tensor: `num_items` items of `item_bytes` bytes, back to back from `address`."""

    name: str
    kind: Kind
    layer: int
    address: int
    item_bytes: int
    num_items: int

    @property
    def num_bytes(self) -> int:
        return self.item_bytes * self.num_items


@dataclass(frozen=True)
class CacheLayout:
    """All groups of one worker in layer order. `digest`: hex; equal when two workers mean the same by the same bytes."""

    groups: tuple[RegionGroup, ...]
    digest: str

    @classmethod
    def of(cls, memory: CacheMemory) -> CacheLayout:
        """The layout of this worker's own tensors."""
        groups = []
        for (name, kind, layer, item_bytes), tensor in zip(_shapes(memory.specs), group_tensors(memory), strict=True):
            assert tensor.is_contiguous(), f"{name} must be contiguous: its items are addressed by stride"
            assert tensor.shape[0] * item_bytes == tensor.numel() * tensor.element_size()
            groups.append(RegionGroup(name, kind, layer, tensor.data_ptr(), item_bytes, tensor.shape[0]))
        return cls(groups=tuple(groups), digest=layout_digest(memory.specs))

    @classmethod
    def from_wire(cls, groups: Iterable[WireGroup], local: CacheLayout) -> CacheLayout:
        """A peer's layout, checked number by number against our own. That its digest is ours was settled by
        `require_digest` when the two were paired, and the hand-off record says it again.

        Raises:
            PeerRefused: a group differs from ours, or a number cannot be true.
        """
        checked = tuple(_checked(group) for group in groups)
        _require_alike(checked, local.groups)
        _require_apart(checked)
        return cls(groups=checked, digest=local.digest)

    def require_digest(self, theirs: str) -> None:
        """Raises PeerRefused unless the peer means the same as we by the same bytes."""
        if theirs != self.digest:
            raise PeerRefused(
                f"cache layout {theirs!r} there, {self.digest!r} here: both pools must serve one model in one setting"
            )

    @cached_property
    def firsts(self) -> tuple[int, ...]:
        """Descriptor index of item 0, per group."""
        firsts, total = [], 0
        for group in self.groups:
            firsts.append(total)
            total += group.num_items
        if total > _MAX_DESCRIPTORS:
            raise ValueError(f"{total:,} cache items are more than one descriptor list can number: use larger blocks")
        return tuple(firsts)

    @cached_property
    def kv_firsts(self) -> dict[int, int]:
        """Layer → descriptor index of its block 0."""
        return {g.layer: first for g, first in zip(self.groups, self.firsts, strict=True) if g.kind == "kv"}

    @cached_property
    def state_firsts(self) -> dict[int, tuple[int, ...]]:
        """Layer → descriptor indices of slot 0, one per cache kind of that layer."""
        firsts: dict[int, tuple[int, ...]] = {}
        for group, first in zip(self.groups, self.firsts, strict=True):
            if group.kind == "state":
                firsts[group.layer] = (*firsts.get(group.layer, ()), first)
        return firsts

    @cached_property
    def last_state_layer(self) -> int | None:
        """Deepest layer that has a state; None: no layer has."""
        return max(self.state_firsts, default=None)

    @cached_property
    def state_layer_bytes(self) -> dict[int, int]:
        """Layer → bytes of one slot of it."""
        sizes: dict[int, int] = {}
        for group in self.groups:
            if group.kind == "state":
                sizes[group.layer] = sizes.get(group.layer, 0) + group.item_bytes
        return sizes

    @cached_property
    def kv_layer_bytes(self) -> dict[int, int]:
        """Layer → bytes of one block of it."""
        return {group.layer: group.item_bytes for group in self.groups if group.kind == "kv"}

    def num_items(self, kind: Kind) -> int | None:
        """Blocks or slots of this worker; None: the model has no such cache."""
        return next((group.num_items for group in self.groups if group.kind == kind), None)

    def index(self, group: int, item: int) -> int:
        """Descriptor index of one item. `group`: position in `groups`."""
        if not 0 <= item < self.groups[group].num_items:
            raise ValueError(f"{self.groups[group].name} has no item {item}")
        return self.firsts[group] + item

    def descriptors(self) -> NDArray[np.uint64]:
        """`[N, 3]` rows (address, bytes, device 0) in index order; 64 bits throughout, since offsets pass 2 GiB."""
        rows = np.zeros((sum(g.num_items for g in self.groups), 3), dtype=np.uint64)
        for group, first in zip(self.groups, self.firsts, strict=True):
            part = rows[first : first + group.num_items]
            part[:, 0] = np.uint64(group.address) + np.arange(group.num_items, dtype=np.uint64) * np.uint64(group.item_bytes)
            part[:, 1] = group.item_bytes
        return rows


def group_tensors(memory: CacheMemory) -> list[torch.Tensor]:
    """The tensors behind `CacheLayout.groups`, in the same order."""
    tensors = []
    for index, layer in enumerate(memory.specs.layers):
        if isinstance(layer[0], PagedKvSpec):
            tensors.append(memory.kv[index])
        else:
            tensors += [memory.conv[index], memory.recurrent[index]]
    return tensors


def layout_digest(specs: CacheSpecs) -> str:
    """Hex over everything that gives the bytes their meaning: order, names, sizes, dtypes, shapes, and how the convolution's
    rows divide. Addresses and numbers of items are each worker's own affair."""
    digest = hashlib.sha256(f"tandem cache layout {LAYOUT_VERSION}\n".encode())
    for name, kind, layer, item_bytes in _shapes(specs):
        digest.update(f"{name} {kind} {layer} {item_bytes}\n".encode())
    for layer_specs in specs.layers:
        for spec in layer_specs:
            digest.update(f"{_meaning(spec)}\n".encode())
    return digest.hexdigest()[:32]


def _meaning(spec: PagedKvSpec | ConvTailSpec | RecurrentSpec) -> str:
    cut = f" {spec.query_channels}/{spec.key_channels}/{spec.value_channels}" if isinstance(spec, ConvTailSpec) else ""
    return f"{type(spec).__name__} {spec.dtype} {spec.item_shape}{cut}"


def _shapes(specs: CacheSpecs) -> list[tuple[str, Kind, int, int]]:
    """(name, kind, layer, item bytes) of each group, in the order of `group_tensors`."""
    shapes: list[tuple[str, Kind, int, int]] = []
    for index, layer in enumerate(specs.layers):
        if isinstance(layer[0], PagedKvSpec):
            shapes.append((f"kv.{index}", "kv", index, layer[0].item_bytes))
        else:
            shapes.append((f"conv.{index}", "state", index, layer[0].item_bytes))
            shapes.append((f"recurrent.{index}", "state", index, layer[1].item_bytes))
    return shapes


def _checked(group: WireGroup) -> RegionGroup:
    """One group whose own numbers are possible."""
    for field in ("layer", "address", "item_bytes", "num_items"):
        value = getattr(group, field)
        if not isinstance(value, int) or isinstance(value, bool) or value < (0 if field == "layer" else 1):
            raise PeerRefused(f"region {group.name!r}: {field} = {value!r} is not possible")
    if group.kind != "kv" and group.kind != "state":
        raise PeerRefused(f"region {group.name!r}: kind {group.kind!r} is neither kv nor state")
    if group.address + group.item_bytes * group.num_items > _ADDRESS_LIMIT:
        raise PeerRefused(f"region {group.name!r} ends past the address space")
    kind: Kind = "kv" if group.kind == "kv" else "state"
    return RegionGroup(str(group.name), kind, group.layer, group.address, group.item_bytes, group.num_items)


def _require_alike(theirs: Sequence[RegionGroup], ours: Sequence[RegionGroup]) -> None:
    if len(theirs) != len(ours):
        raise PeerRefused(f"the peer has {len(theirs)} cache regions, we have {len(ours)}")
    items: dict[str, int] = {}
    for their, our in zip(theirs, ours, strict=True):
        for field in ("name", "kind", "layer", "item_bytes"):
            if getattr(their, field) != getattr(our, field):
                raise PeerRefused(
                    f"region {our.name}: {field} is {getattr(their, field)!r} there, {getattr(our, field)!r} here"
                )
        if items.setdefault(their.kind, their.num_items) != their.num_items:
            raise PeerRefused(
                f"region {their.name}: {their.num_items} items, other {their.kind} regions have {items[their.kind]}"
            )
    if sum(group.num_items for group in theirs) > _MAX_DESCRIPTORS:
        raise PeerRefused("the peer has more cache items than one descriptor list can number")


def _require_apart(groups: Sequence[RegionGroup]) -> None:
    by_address = sorted(groups, key=lambda group: group.address)
    for left, right in itertools.pairwise(by_address):
        if left.address + left.num_bytes > right.address:
            raise PeerRefused(f"regions {left.name} and {right.name} overlap")
