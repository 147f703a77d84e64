"""Cutting one step's batch into tiles that each layer computes in turn.

Two ends: a tile's intermediate results stay in the processor's cache, and a sequence's numbers do not depend on its
company. A matrix product rounds a row differently for different row counts, except up to `small` rows, so a piece of a
sequence stands alone in its tile unless it is that short. Cut prompts into chunks at multiples of `most` positions, and
the tiles, and so every bit of the result, are those of the uncut prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tandem.model.batch import ForwardBatch

__all__ = ["cut_into_tiles"]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows `start:end` of the batch, all of `sequence`; `context` positions come before them."""

    sequence: int
    start: int
    end: int
    context: int


def cut_into_tiles(batch: ForwardBatch, most: int, small: int) -> list[tuple[torch.Tensor, ForwardBatch]]:
    """Tiles of at most `most` rows, in an order in which each sequence's positions ascend, each with the rows of the batch
    that it holds (int64). A batch of single tokens (decode), or of one piece, is one tile."""
    if batch.is_decode:
        return [(torch.arange(batch.num_sequences, device=batch.slots_B.device), batch)]
    return [_tile(batch, pieces) for pieces in _group(_pieces(batch, most), small)]


def _pieces(batch: ForwardBatch, most: int) -> Iterator[_Piece]:
    for sequence, context in enumerate(batch.context_lens):
        start, end = batch.cu_seqlens[sequence], batch.cu_seqlens[sequence + 1]
        while start < end:
            # Cut at multiples of `most` counted from the sequence's own beginning.
            cut = min(end, start + most - context % most)
            yield _Piece(sequence, start, cut, context)
            context += cut - start
            start = cut


def _group(pieces: Iterator[_Piece], small: int) -> Iterator[list[_Piece]]:
    """Short pieces of different sequences share tiles of up to `small` rows; every other piece is a tile."""
    shared: list[_Piece] = []
    for piece in pieces:
        rows = piece.end - piece.start
        shared_rows = sum(p.end - p.start for p in shared)
        # A sequence's pieces depend on one another: never two in a tile, never a later one first.
        if shared and (shared_rows + rows > small or shared[-1].sequence == piece.sequence):
            yield shared
            shared = []
        if rows > small:
            yield [piece]
        else:
            shared.append(piece)
    if shared:
        yield shared


def _tile(batch: ForwardBatch, pieces: list[_Piece]) -> tuple[torch.Tensor, ForwardBatch]:
    rows = torch.cat([torch.arange(p.start, p.end, device=batch.slots_B.device) for p in pieces])
    ends = [0]
    for piece in pieces:
        ends.append(ends[-1] + piece.end - piece.start)
    sequences = [piece.sequence for piece in pieces]
    return rows, ForwardBatch(
        token_ids_T=batch.token_ids_T[rows],
        positions_T=batch.positions_T[rows],
        cu_seqlens=tuple(ends),
        context_lens=tuple(piece.context for piece in pieces),
        block_tables_BW=batch.block_tables_BW[sequences],
        slots_B=batch.slots_B[sequences],
        kv_slots_T=batch.kv_slots_T[rows],
    )
