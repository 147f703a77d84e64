"""Which descriptors go where for one hand-off, and which of them have gone already. Pure, on the caller's thread.

Keys and values of a full block never change, so they may leave as soon as their chunk is done. A layer's state is final
only after the last position, so it leaves once, in the last chunk. `Coverage` hands every item out exactly once, whatever
the order of the pushes; what was not pushed by the end goes with `rest`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tandem.errors import HandoffRefused
from transfer.layout import CacheLayout, Kind

__all__ = ["Coverage", "Indices", "Part", "TransferPlan"]

Indices = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Part:
    """One write: local descriptor i goes to remote descriptor i. Both `[n]` int32. `state_layer`: whose state it is, or None
    for keys and values."""

    kind: Kind
    local: Indices
    remote: Indices
    num_bytes: int
    state_layer: int | None = None


@dataclass(frozen=True)
class TransferPlan:
    """The pairing of one sequence's blocks and slot on both sides.

    local, remote: layouts of equal digest. local_blocks, remote_blocks: `[blocks of the prompt]`, position i is block i of
    the sequence. local_slot, remote_slot: its state slots. num_held: leading blocks that the other side has already; they
    may belong to others there too, and must not be written.
    """

    local: CacheLayout
    remote: CacheLayout
    local_blocks: Indices
    remote_blocks: Indices
    local_slot: int
    remote_slot: int
    num_held: int = 0

    @classmethod
    def build(
        cls,
        local: CacheLayout,
        remote: CacheLayout,
        blocks: tuple[Sequence[int], Sequence[int]],
        slots: tuple[int, int],
        num_held: int = 0,
    ) -> TransferPlan:
        """`blocks`, `slots`: (local, granted).

        Raises:
            HandoffRefused: what was granted cannot be: names `block_ids`, `slot` or `num_held`.
            ValueError: the local indices are wrong.
        """
        local_blocks, remote_blocks = blocks
        if local.digest != remote.digest:
            raise ValueError("plans exist only between equal layouts")
        if problem := _problem(local_blocks, slots[0], local):
            raise ValueError(f"local {problem[0]}: {problem[1]}")
        if problem := _problem(remote_blocks, slots[1], remote):
            raise HandoffRefused(*problem)
        if len(remote_blocks) < len(local_blocks):
            raise HandoffRefused("block_ids", f"{len(remote_blocks)} blocks granted, {len(local_blocks)} needed")
        if not 0 <= num_held <= len(local_blocks):
            raise HandoffRefused("num_held", f"{num_held} blocks held of {len(local_blocks)}")
        return cls(
            local=local,
            remote=remote,
            local_blocks=np.asarray(local_blocks, dtype=np.int32),
            remote_blocks=np.asarray(remote_blocks[: len(local_blocks)], dtype=np.int32),
            local_slot=slots[0],
            remote_slot=slots[1],
            num_held=num_held,
        )

    @property
    def kv_layers(self) -> tuple[int, ...]:
        return tuple(self.local.kv_firsts)

    @property
    def state_layers(self) -> tuple[int, ...]:
        return tuple(self.local.state_firsts)

    @property
    def num_blocks(self) -> int:
        return len(self.local_blocks)

    @property
    def state_bytes(self) -> int:
        return sum(self.local.state_layer_bytes.values())

    def kv_bytes(self, num_blocks: int) -> int:
        """That travel of the first `num_blocks` blocks, over all attention layers."""
        return max(0, num_blocks - self.num_held) * self._block_bytes

    def held_bytes(self, num_blocks: int) -> int:
        """Of the first `num_blocks` blocks, what need not travel."""
        return min(num_blocks, self.num_held) * self._block_bytes

    @property
    def _block_bytes(self) -> int:
        return sum(self.local.kv_layer_bytes.values())

    def kv(self, layer: int, numbers: NDArray[np.int64]) -> Part:
        """Blocks `numbers` (positions in the sequence's block table) of one attention layer."""
        return Part(
            kind="kv",
            local=self.local_blocks[numbers] + np.int32(self.local.kv_firsts[layer]),
            remote=self.remote_blocks[numbers] + np.int32(self.remote.kv_firsts[layer]),
            num_bytes=len(numbers) * self.local.kv_layer_bytes[layer],
        )

    def state(self, layer: int) -> Part:
        """Convolution tail and recurrent matrix of one DeltaNet layer."""
        return Part(
            kind="state",
            local=np.asarray(self.local.state_firsts[layer], dtype=np.int32) + np.int32(self.local_slot),
            remote=np.asarray(self.remote.state_firsts[layer], dtype=np.int32) + np.int32(self.remote_slot),
            num_bytes=self.local.state_layer_bytes[layer],
            state_layer=layer,
        )


class Coverage:
    """What of a plan was handed out. Every item goes at most once, and after `rest` exactly once; held blocks never go."""

    def __init__(self, plan: TransferPlan) -> None:
        self.plan = plan
        self._kv_sent = {layer: np.zeros(plan.num_blocks, dtype=np.bool_) for layer in plan.kv_layers}
        self._state_left = dict.fromkeys(plan.state_layers)

    def kv(self, layers: Collection[int] | None, start_block: int, stop_block: int) -> Iterator[Part]:
        """Parts for blocks `start_block … stop_block - 1` of `layers` (None: all attention layers).

        Raises:
            ValueError: out of range, not an attention layer, or handed out before: a block that still changes must not leave.
        """
        if not 0 <= start_block <= stop_block <= self.plan.num_blocks:
            raise ValueError(f"blocks {start_block} … {stop_block} of {self.plan.num_blocks}")
        wanted = self.plan.kv_layers if layers is None else tuple(layers)
        for layer in wanted:
            if layer not in self._kv_sent:
                raise ValueError(f"layer {layer} keeps no KV")
            if self._kv_sent[layer][start_block:stop_block].any():
                raise ValueError(f"layer {layer}: a block of {start_block} … {stop_block} was pushed before")
        numbers = np.arange(max(start_block, self.plan.num_held), stop_block)
        return self._take_kv(wanted, dict.fromkeys(wanted, numbers))

    def state(self, layer: int) -> Part:
        """The state of one layer.

        Raises:
            ValueError: not a DeltaNet layer of this plan, or handed out before.
        """
        if layer not in self._state_left:
            raise ValueError(f"layer {layer} keeps no state, or it was pushed before")
        del self._state_left[layer]
        return self.plan.state(layer)

    def rest(self, num_blocks: int) -> list[Part]:
        """Everything of the first `num_blocks` blocks and of the state that was not handed out yet."""
        if not 0 <= num_blocks <= self.plan.num_blocks:
            raise ValueError(f"{num_blocks} blocks are needed, the plan has {self.plan.num_blocks}")
        if any(sent[num_blocks:].any() for sent in self._kv_sent.values()):
            raise ValueError(f"a block past the first {num_blocks} was pushed")
        held = self.plan.num_held
        left = {layer: held + np.flatnonzero(~sent[held:num_blocks]) for layer, sent in self._kv_sent.items()}
        parts = list(self._take_kv(self.plan.kv_layers, left))
        return parts + [self.state(layer) for layer in tuple(self._state_left)]

    def _take_kv(self, layers: Sequence[int], numbers: dict[int, NDArray[np.int64]]) -> Iterator[Part]:
        parts = []
        for layer in layers:
            if len(numbers[layer]):
                self._kv_sent[layer][numbers[layer]] = True
                parts.append(self.plan.kv(layer, numbers[layer]))
        return iter(parts)


def _problem(blocks: Sequence[int], slot: int, layout: CacheLayout) -> tuple[str, str] | None:
    """What is wrong with one side's indices, as (field, reason)."""
    num_blocks, num_slots = layout.num_items("kv"), layout.num_items("state")
    if len(set(blocks)) != len(blocks):
        return "block_ids", "a block occurs twice"
    if num_blocks is not None and any(not 0 <= block < num_blocks for block in blocks):
        return "block_ids", f"a block is outside 0 … {num_blocks - 1}"
    if num_slots is not None and not 0 <= slot < num_slots:
        return "slot", f"{slot} is outside 0 … {num_slots - 1}"
    return None
