from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tandem.model.batch import ForwardBatch, SequenceChunk
from tandem.model.tiles import cut_into_tiles

MOST, SMALL, BLOCK = 16, 4, 4


def batch_of(shapes: list[tuple[int, int]]) -> ForwardBatch:
    """shapes: (context, new tokens). Tokens are numbered through the batch, blocks and slots by sequence."""
    chunks, token = [], 0
    for i, (context, count) in enumerate(shapes):
        blocks = [100 * i + b for b in range(40)]
        chunks.append(SequenceChunk(list(range(token, token + count)), context, blocks, slot=i))
        token += count
    return ForwardBatch.build(chunks, BLOCK)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 60)), min_size=1, max_size=6))
def test_tiles_cover_the_batch_once_in_each_sequences_order(shapes: list[tuple[int, int]]) -> None:
    batch = batch_of(shapes)
    tiles = cut_into_tiles(batch, MOST, SMALL)
    rows = [row for rows, _ in tiles for row in rows.tolist()]
    assert sorted(rows) == list(range(batch.cu_seqlens[-1]))
    absorbed = [context for context, _ in shapes]
    for tile_rows, tile in tiles:
        assert tile.token_ids_T.tolist() == tile_rows.tolist()
        assert tile.positions_T.tolist() == batch.positions_T[tile_rows].tolist()
        assert tile.kv_slots_T.tolist() == batch.kv_slots_T[tile_rows].tolist()
        slots = tile.slots_B.tolist()
        assert len(set(slots)) == len(slots), "two pieces of one sequence depend on one another"
        for i, slot in enumerate(slots):
            assert tile.context_lens[i] == absorbed[slot]
            assert tile.block_tables_BW[i].tolist() == batch.block_tables_BW[slot].tolist()
            absorbed[slot] += tile.cu_seqlens[i + 1] - tile.cu_seqlens[i]
    assert absorbed == [context + count for context, count in shapes]


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(2, 60)), min_size=1, max_size=6))
def test_only_short_pieces_share_a_tile(shapes: list[tuple[int, int]]) -> None:
    for rows, tile in cut_into_tiles(batch_of(shapes), MOST, SMALL):
        assert len(rows) <= (MOST if tile.num_sequences == 1 else SMALL)


@given(st.integers(0, 3), st.integers(1, 60))
def test_a_cut_at_a_multiple_of_the_tile_changes_no_tile(multiple: int, count: int) -> None:
    cut = multiple * MOST
    whole = cut_into_tiles(batch_of([(0, cut + count)]), MOST, SMALL)
    parts = cut_into_tiles(batch_of([(0, cut)]), MOST, SMALL) if cut else []
    parts += cut_into_tiles(batch_of([(cut, count)]), MOST, SMALL)
    assert [(t.context_lens, t.cu_seqlens) for _, t in whole] == [(t.context_lens, t.cu_seqlens) for _, t in parts]


def test_a_decode_step_is_one_tile_whatever_its_size() -> None:
    batch = batch_of([(5, 1)] * 50)
    ((rows, tile),) = cut_into_tiles(batch, MOST, SMALL)
    assert rows.tolist() == list(range(50))
    assert tile is batch
