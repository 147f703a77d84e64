"""The tensors behind the two pools of one worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tandem.cache.budget import PoolSizes
from tandem.cache.spec import CacheSpecs, DType, PagedKvSpec

__all__ = ["CacheMemory", "SavedSequence", "torch_dtype"]


def torch_dtype(dtype: DType) -> torch.dtype:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]


@dataclass(frozen=True, eq=False, slots=True)
class SavedSequence:
    """A copy in host memory. kv: per attention layer the blocks in order, `[num_blocks, *item_shape]`; states: per tensor of
    the recurrent part the slot, `item_shape`."""

    kv: tuple[torch.Tensor, ...]
    states: tuple[torch.Tensor, ...]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.kv, *self.states))


@dataclass(frozen=True)
class CacheMemory:
    """One tensor per layer and cache kind; the first axis is the block or slot index.

    `kv[i]`: `[num_blocks, 2, block_size_tokens, num_kv_heads, head_dim]`; `conv[i]`: `[num_slots, channels, width - 1]`;
    `recurrent[i]`: `[num_slots, num_heads, key_dim, value_dim]` fp32; keys are layer indices. Allocated once at start and
    registered with the transfer agent, so no tensor in here is ever replaced. `sizes.num_slots` counts every slot: those of
    running sequences first, those of recurrent checkpoints after them.
    """

    specs: CacheSpecs
    sizes: PoolSizes
    kv: dict[int, torch.Tensor]
    conv: dict[int, torch.Tensor]
    recurrent: dict[int, torch.Tensor]

    @classmethod
    def allocate(cls, specs: CacheSpecs, sizes: PoolSizes, device: str = "cpu") -> CacheMemory:
        kv: dict[int, torch.Tensor] = {}
        conv: dict[int, torch.Tensor] = {}
        recurrent: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(specs.layers):
            if isinstance(layer[0], PagedKvSpec):
                kv[index] = _zeros(sizes.num_blocks, layer[0].item_shape, layer[0].dtype, device)
            else:
                tail, matrix = layer[0], layer[1]
                conv[index] = _zeros(sizes.num_slots, tail.item_shape, tail.dtype, device)
                recurrent[index] = _zeros(sizes.num_slots, matrix.item_shape, matrix.dtype, device)
        return cls(specs=specs, sizes=sizes, kv=kv, conv=conv, recurrent=recurrent)

    def copy_slot(self, source: int, target: int) -> None:
        """The state of one sequence, in all layers."""
        for tensor in self._state_tensors:
            tensor[target].copy_(tensor[source])

    def copy_block(self, source: int, target: int) -> None:
        """Keys and values of one block, in all layers."""
        for tensor in self.kv.values():
            tensor[target].copy_(tensor[source])

    def save(self, block_ids: Sequence[int], slot: int) -> SavedSequence:
        """A copy of these blocks, in this order, and of the slot."""
        return SavedSequence(
            kv=tuple(tensor[list(block_ids)].to("cpu") for tensor in self.kv.values()),
            states=tuple(tensor[slot].to("cpu", copy=True) for tensor in self._state_tensors),
        )

    def restore(self, saved: SavedSequence, block_ids: Sequence[int], slot: int) -> None:
        """The inverse of `save`, at whatever place. block_ids: as many as were saved."""
        index = torch.tensor(list(block_ids), dtype=torch.long)
        for tensor, blocks in zip(self.kv.values(), saved.kv, strict=True):
            tensor.index_copy_(0, index.to(tensor.device), blocks.to(tensor.device))
        for tensor, state in zip(self._state_tensors, saved.states, strict=True):
            tensor[slot].copy_(state)

    @property
    def _state_tensors(self) -> tuple[torch.Tensor, ...]:
        return (*self.conv.values(), *self.recurrent.values())


def _zeros(count: int, item_shape: tuple[int, ...], dtype: DType, device: str) -> torch.Tensor:
    return torch.zeros((count, *item_shape), dtype=torch_dtype(dtype), device=device)
