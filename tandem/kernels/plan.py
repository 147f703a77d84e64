"""What one step's batch means for the CPU kernels: host-side spans and index tensors, made once for all layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tandem.kernels.linear import ALIKE_ROWS
from tandem.model.batch import ForwardBatch

__all__ = ["CpuPlan", "Span"]


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's rows `start:end` of the ragged batch, after `context` cached positions.

    num_blocks: blocks that hold its `context + (end - start)` positions. mask: additive causal mask `[n, context + n]`
    where new tokens attend to cached ones and there is more than one; else None.
    """

    start: int
    end: int
    context: int
    slot: int
    num_blocks: int
    mask: torch.Tensor | None

    @property
    def length(self) -> int:
        return self.end - self.start

    @property
    def total(self) -> int:
        return self.context + self.length


@dataclass(frozen=True)
class CpuPlan:
    """is_decode: one new token per sequence, all with context. is_exact: rows of several sequences may stand together, so no
    row's result may depend on the others (larger tiles hold one sequence, see `tandem.model.tiles`).

    kv_rows_2T: rows of `kv` seen as
    `[blocks * 2 * block, G, D]` that take the new keys, then the new values. gather_2W: rows of `kv` seen as
    `[blocks * 2, block, G, D]`: key blocks of every sequence in turn, then their value blocks. slot_range: set when the
    batch's slots ascend without a gap, so that a view serves instead of a gather and a scatter.
    """

    spans: tuple[Span, ...]
    is_decode: bool
    is_exact: bool
    slots_B: torch.Tensor
    slot_range: slice | None
    kv_rows_2T: torch.Tensor
    gather_2W: torch.Tensor

    @classmethod
    def make(cls, batch: ForwardBatch, block_size_tokens: int, dtype: torch.dtype) -> CpuPlan:
        slots: list[int] = batch.slots_B.tolist()
        spans = []
        for i, (context, slot) in enumerate(zip(batch.context_lens, slots, strict=True)):
            start, end = batch.cu_seqlens[i], batch.cu_seqlens[i + 1]
            num_blocks = -(-(context + end - start) // block_size_tokens)
            mask = _causal_mask(end - start, context, dtype) if context and end - start > 1 else None
            spans.append(Span(start, end, context, slot, num_blocks, mask))
        ascending = all(slot == slots[0] + i for i, slot in enumerate(slots))
        return cls(
            spans=tuple(spans),
            is_decode=batch.is_decode,
            is_exact=batch.is_decode or batch.cu_seqlens[-1] <= ALIKE_ROWS,
            slots_B=batch.slots_B,
            slot_range=slice(slots[0], slots[0] + len(slots)) if ascending else None,
            kv_rows_2T=_kv_rows(batch.kv_slots_T, block_size_tokens),
            gather_2W=_gather_rows(batch.block_tables_BW, spans),
        )


def _kv_rows(kv_slots_T: torch.Tensor, block_size_tokens: int) -> torch.Tensor:
    # kv_slot = block * size + offset; the key's row is block * 2 * size + offset, the value's lies `size` rows further.
    key_rows_T = kv_slots_T + kv_slots_T.div(block_size_tokens, rounding_mode="floor") * block_size_tokens
    return torch.cat([key_rows_T, key_rows_T + block_size_tokens])


def _gather_rows(block_tables_BW: torch.Tensor, spans: list[Span]) -> torch.Tensor:
    # Fresh sequences attend to the keys in hand and gather nothing.
    used = [table[: span.num_blocks] for table, span in zip(block_tables_BW, spans, strict=True) if span.context]
    if not used:
        return block_tables_BW.new_empty(0, dtype=torch.int64)
    key_rows_W = torch.cat(used).long() * 2
    return torch.cat([key_rows_W, key_rows_W + 1])


def _causal_mask(length: int, context: int, dtype: torch.dtype) -> torch.Tensor:
    mask = torch.full((length, context + length), float("-inf"), dtype=dtype)
    return mask.triu_(context + 1)
