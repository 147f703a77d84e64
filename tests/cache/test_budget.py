import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.cache.budget import size_pools
from tandem.cache.spec import CacheSpecs, ConvTailSpec, PagedKvSpec, RecurrentSpec
from tandem.errors import CapacityError

KV = PagedKvSpec(num_kv_heads=4, head_dim=256, block_size_tokens=16, dtype="bfloat16")
STATE = (ConvTailSpec(2048, 2048, 6144, 4, "bfloat16"), RecurrentSpec(48, 128, 128))
SPECS_27B = CacheSpecs(layers=tuple((KV,) if (i + 1) % 4 == 0 else STATE for i in range(64)))


def test_sizes_at_27b_are_those_of_the_model_card() -> None:
    assert SPECS_27B.block_bytes == 16 * 65_536
    assert SPECS_27B.slot_bytes == 150_994_944 + 2_949_120


@given(st.integers(0, 400), st.integers(1, 40_000), st.integers(1, 128))
def test_pools_stay_within_the_budget_and_hold_one_full_sequence(extra_gib: int, context: int, sequences: int) -> None:
    need = SPECS_27B.blocks_for(context) * SPECS_27B.block_bytes + SPECS_27B.slot_bytes
    budget = need + (extra_gib << 30)
    sizes = size_pools(SPECS_27B, budget, context, sequences)
    assert sizes.num_blocks * SPECS_27B.block_bytes + sizes.num_slots * SPECS_27B.slot_bytes <= budget
    assert sizes.num_blocks >= SPECS_27B.blocks_for(context)
    assert 1 <= sizes.num_slots <= sequences


def test_a_budget_below_one_full_sequence_is_refused_with_the_numbers() -> None:
    need = SPECS_27B.blocks_for(1000) * SPECS_27B.block_bytes + SPECS_27B.slot_bytes
    with pytest.raises(CapacityError, match=f"1000 tokens needs {need:,} bytes.*the budget is {need - 1:,}"):
        size_pools(SPECS_27B, need - 1, 1000, 8)
