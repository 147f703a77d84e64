"""What is saved comes back the same, wherever it is put."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.cache.budget import PoolSizes
from tandem.cache.memory import CacheMemory
from tandem.cache.spec import CacheSpecs, ConvTailSpec, PagedKvSpec, RecurrentSpec

NUM_BLOCKS, NUM_SLOTS = 6, 3
STATE = (ConvTailSpec(2, 2, 4, 4, "bfloat16"), RecurrentSpec(2, 3, 5))
SPECS = CacheSpecs((STATE, (PagedKvSpec(2, 4, 4, "bfloat16"),), STATE, (PagedKvSpec(2, 4, 4, "bfloat16"),)))
BLOCK_IDS = st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True, max_size=NUM_BLOCKS)


def filled() -> CacheMemory:
    memory = CacheMemory.allocate(SPECS, PoolSizes(NUM_BLOCKS, NUM_SLOTS))
    generator = torch.Generator().manual_seed(1)
    for tensors in (memory.kv, memory.conv, memory.recurrent):
        for tensor in tensors.values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return memory


@given(BLOCK_IDS, st.integers(0, NUM_SLOTS - 1), st.permutations(range(NUM_BLOCKS)), st.integers(0, NUM_SLOTS - 1))
def test_a_sequence_comes_back_whole_to_another_place_and_touches_no_other(
    block_ids: list[int], slot: int, places: list[int], to_slot: int
) -> None:
    before, memory = filled(), filled()
    saved = memory.save(block_ids, slot)
    assert saved.num_bytes == len(block_ids) * SPECS.block_bytes + SPECS.slot_bytes
    for tensors in (memory.kv, memory.conv, memory.recurrent):
        for tensor in tensors.values():
            tensor.zero_()
    to_blocks = places[: len(block_ids)]
    memory.restore(saved, to_blocks, to_slot)
    for layer, tensor in memory.kv.items():
        assert torch.equal(tensor[to_blocks], before.kv[layer][block_ids])
        assert not tensor[places[len(block_ids) :]].any()
    for mine, theirs in ((memory.conv, before.conv), (memory.recurrent, before.recurrent)):
        for layer, tensor in mine.items():
            assert torch.equal(tensor[to_slot], theirs[layer][slot])
            assert not tensor[[other for other in range(NUM_SLOTS) if other != to_slot]].any()
