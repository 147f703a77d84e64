from hypothesis import given
from hypothesis import strategies as st

from tandem.cache.growth import expected_blocks

BLOCKS = st.integers(0, 5000)


@given(BLOCKS, BLOCKS, st.floats(1.0, 1000.0))
def test_what_is_expected_lies_between_the_prompt_and_the_whole(now: int, growth: int, overcommit: float) -> None:
    expected = expected_blocks(now, now + growth, overcommit)
    assert now + min(growth, 1) <= expected <= now + growth
    assert (expected - now) * overcommit >= growth * (1 - 1e-9)


@given(BLOCKS, BLOCKS, st.floats(0.0, 1000.0))
def test_without_overcommit_or_after_a_resumption_it_is_the_whole(now: int, growth: int, overcommit: float) -> None:
    assert expected_blocks(now, now + growth, 1.0) == now + growth
    assert expected_blocks(now, now + growth, overcommit, resumed=True) == now + growth


def test_half_of_the_growth_at_twice_the_memory() -> None:
    assert [expected_blocks(2, whole, 2.0) for whole in (2, 3, 4, 5, 12)] == [2, 3, 3, 4, 7]
