import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.cache.pool import IndexPool


@given(st.lists(st.integers(0, 7), max_size=60))
def test_allocate_and_free_are_inverses(wishes: list[int]) -> None:
    pool = IndexPool(16, "blocks")
    held: list[list[int]] = []
    for wish in wishes:
        if pool.can_allocate(wish):
            held.append(pool.allocate(wish))
        elif held:
            pool.free(held.pop(0))
        owned = [i for indices in held for i in indices]
        assert len(set(owned)) == len(owned) == pool.num_used
        assert pool.check(owned) == []
    for indices in held:
        pool.free(indices)
    assert pool.num_free == 16
    assert pool.check(()) == []


def test_a_double_free_changes_nothing() -> None:
    pool = IndexPool(4, "blocks")
    first = pool.allocate(2)
    pool.free(first[:1])
    with pytest.raises(ValueError, match="not allocated"):
        pool.free(first)
    with pytest.raises(ValueError, match="twice"):
        pool.free([first[1], first[1]])
    assert pool.num_used == 1
    assert pool.check([first[1]]) == []


def test_check_names_leaked_and_doubly_owned_indices() -> None:
    pool = IndexPool(4, "slots")
    taken = pool.allocate(2)
    assert pool.check([]) == taken
    assert pool.check([*taken, taken[0]]) == [taken[0]]
    assert pool.check([*taken, 3]) == [3]


def test_more_than_is_free_is_refused() -> None:
    pool = IndexPool(2, "blocks")
    assert not pool.can_allocate(3)
    assert not pool.can_allocate(-1)
    with pytest.raises(ValueError, match="3 wanted, 2 free"):
        pool.allocate(3)
