"""One step's input: a ragged batch of new tokens over caches that already hold what came before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["ForwardBatch", "SequenceChunk"]


@dataclass(frozen=True, slots=True)
class SequenceChunk:
    """The new tokens of one sequence in one step.

    tokens: new token ids, at least one. context_tokens: positions already in the caches; 0 = a fresh sequence, whose
    slot is treated as zeros whatever it holds. block_ids: the sequence's block table, enough blocks for
    `context_tokens + len(tokens)` positions. slot: its state slot.
    """

    tokens: Sequence[int]
    context_tokens: int
    block_ids: Sequence[int]
    slot: int


@dataclass(frozen=True)
class ForwardBatch:
    """Shapes: T new tokens in all, B sequences, W = widest block table.

    token_ids_T, positions_T: int64. cu_seqlens: B+1 host integers, exclusive prefix sum of new tokens.
    context_lens: B host integers. block_tables_BW: int32, rows padded with 0 past a sequence's blocks.
    slots_B: int64. kv_slots_T: int64, where each new token's key and value go: block_id * block_size_tokens + offset.
    """

    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    cu_seqlens: tuple[int, ...]
    context_lens: tuple[int, ...]
    block_tables_BW: torch.Tensor
    slots_B: torch.Tensor
    kv_slots_T: torch.Tensor

    @property
    def num_sequences(self) -> int:
        return len(self.context_lens)

    @property
    def is_decode(self) -> bool:
        """Every sequence has exactly one new token and a history: the step shape of decode workers."""
        return self.cu_seqlens[-1] == self.num_sequences and all(self.context_lens)

    @classmethod
    def build(cls, chunks: Sequence[SequenceChunk], block_size_tokens: int, device: str = "cpu") -> ForwardBatch:
        if not chunks:
            raise ValueError("a batch needs at least one sequence")
        tokens: list[int] = []
        positions: list[int] = []
        kv_slots: list[int] = []
        cu_seqlens = [0]
        for chunk in chunks:
            end = chunk.context_tokens + len(chunk.tokens)
            assert chunk.tokens, "a chunk has at least one token"
            assert len(chunk.block_ids) * block_size_tokens >= end, "too few blocks for the chunk"
            tokens.extend(chunk.tokens)
            positions.extend(range(chunk.context_tokens, end))
            kv_slots.extend(
                chunk.block_ids[p // block_size_tokens] * block_size_tokens + p % block_size_tokens
                for p in range(chunk.context_tokens, end)
            )
            cu_seqlens.append(len(tokens))
        widths = [-(-(c.context_tokens + len(c.tokens)) // block_size_tokens) for c in chunks]
        width = max(widths)
        tables = [list(c.block_ids[:w]) + [0] * (width - w) for c, w in zip(chunks, widths, strict=True)]
        return cls(
            token_ids_T=torch.tensor(tokens, dtype=torch.int64, device=device),
            positions_T=torch.tensor(positions, dtype=torch.int64, device=device),
            cu_seqlens=tuple(cu_seqlens),
            context_lens=tuple(c.context_tokens for c in chunks),
            block_tables_BW=torch.tensor(tables, dtype=torch.int32, device=device),
            slots_B=torch.tensor([c.slot for c in chunks], dtype=torch.int64, device=device),
            kv_slots_T=torch.tensor(kv_slots, dtype=torch.int64, device=device),
        )
