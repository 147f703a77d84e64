"""The prefix cache against a model of itself that is too simple to be wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.cache.names import Prefix, root_name
from tandem.cache.pool import IndexPool
from tandem.cache.prefix import Hit, Holding, PrefixCache

BLOCK = 4


def cache_of(num_blocks: int = 32, num_slots: int = 4, first_slot: int = 10) -> PrefixCache:
    return PrefixCache(IndexPool(num_blocks, "KV blocks"), range(first_slot, first_slot + num_slots), BLOCK)


def prefix_of(tokens: Sequence[int]) -> Prefix:
    return Prefix.of("model", BLOCK, tokens)


def start(cache: PrefixCache, tokens: Sequence[int]) -> tuple[Hit, Holding]:
    prefix = prefix_of(tokens)
    hit = cache.match(prefix)
    holding = cache.take(prefix, hit, -(-len(tokens) // BLOCK))
    assert holding is not None
    return hit, holding


def compute(cache: PrefixCache, tokens: Sequence[int], checkpoints: Sequence[int] = ()) -> Hit:
    """One prompt's whole life."""
    hit, holding = start(cache, tokens)
    for place in (*checkpoints, len(tokens)):
        cache.commit(holding, place)
        cache.keep(holding, place)
    cache.release(holding)
    assert cache.check([]) == []
    return hit


def test_names_chain_over_tokens_model_and_block_size() -> None:
    a, b = prefix_of(range(12)), prefix_of([*range(8), 99, 9, 10, 11])
    assert a.names[:2] == b.names[:2]
    assert a.names[2] != b.names[2]
    assert len({root_name("model", 4), root_name("model", 8), root_name("other", 4)}) == 3
    assert prefix_of([99, *range(1, 12)]).names[2] != a.names[2]


def test_keys_and_values_without_a_checkpoint_are_no_hit() -> None:
    cache = cache_of()
    _, holding = start(cache, range(12))
    cache.commit(holding, 12)
    cache.release(holding)
    hit = cache.match(prefix_of(range(20)))
    assert (hit.num_tokens, hit.num_kv_tokens) == (0, 12)


def test_the_last_position_is_never_taken_from_the_cache() -> None:
    cache = cache_of()
    compute(cache, range(12), checkpoints=[8])
    assert cache.match(prefix_of(range(12))).num_tokens == 8
    assert cache.match(prefix_of(range(13))).num_tokens == 12


def test_a_sequence_that_ends_inside_a_block_is_taken_up_there() -> None:
    cache = cache_of()
    compute(cache, range(10))
    hit, holding = start(cache, range(15))
    assert (hit.num_tokens, len(hit.path), hit.num_kv_tokens) == (10, 2, 8)
    assert hit.partial is not None
    assert holding.block_ids[:2] == tuple(node.block_id for node in hit.path)
    assert hit.partial.block_id not in holding.block_ids  # it will be written on: the prompt has a copy
    assert cache.check([holding]) == []
    assert cache.match(prefix_of([*range(9), 77, 78])).num_tokens == 0


def test_a_sequence_shorter_than_a_block_is_taken_up() -> None:
    cache = cache_of()
    compute(cache, [1, 2])
    assert cache.match(prefix_of([1, 2, 3])).num_tokens == 2
    assert cache.match(prefix_of([1, 2])).num_tokens == 0
    assert cache.match(prefix_of([2, 1, 3])).num_tokens == 0


def test_two_prompts_that_compute_the_same_at_once_share_it_afterwards() -> None:
    cache = cache_of()
    (_, first), (_, second) = start(cache, range(9)), start(cache, [*range(8), 50])
    for holding in (first, second):
        cache.commit(holding, 8)
        cache.keep(holding, 8)
    assert not set(first.block_ids) & set(second.block_ids)
    cache.release(first)
    assert cache.check([second]) == []
    assert cache.num_unpinned == 0  # the second's path is pinned, though it computed in blocks of its own
    cache.release(second)
    assert cache.check([]) == []
    assert cache.match(prefix_of(range(9))).num_tokens == 8


def test_what_was_used_least_recently_goes_first_and_the_deepest_of_a_path_before_its_beginning() -> None:
    cache = cache_of(num_blocks=6)
    compute(cache, range(8))
    compute(cache, range(100, 108))
    assert cache.match(prefix_of(range(9))).num_tokens == 8
    compute(cache, [*range(8), 8])  # the first is used again
    _, holding = start(cache, range(200, 212))
    assert cache.match(prefix_of(range(100, 109))).num_tokens == 0
    assert cache.match(prefix_of(range(9))).num_tokens == 8
    assert cache.check([holding]) == []


def test_a_pinned_path_is_never_evicted_and_a_prompt_without_room_changes_nothing() -> None:
    cache = cache_of(num_blocks=4)
    compute(cache, range(8))
    _, holding = start(cache, range(12))
    prefix = prefix_of(range(50, 58))
    assert cache.take(prefix, cache.match(prefix), 2) is None
    assert cache.check([holding]) == []
    cache.release(holding)
    assert cache.take(prefix, cache.match(prefix), 2) is not None


def test_a_checkpoint_gives_way_to_a_newer_one_but_its_blocks_stay() -> None:
    cache = cache_of(num_slots=1)
    compute(cache, range(8))
    compute(cache, range(100, 108))
    assert cache.match(prefix_of(range(100, 109))).num_tokens == 8
    hit = cache.match(prefix_of(range(9)))
    assert (hit.num_tokens, hit.num_kv_tokens) == (0, 8)


def test_no_slots_keep_nothing() -> None:
    cache = cache_of(num_slots=0)
    compute(cache, range(12), checkpoints=[4])
    assert cache.num_unpinned == 0
    assert cache.match(prefix_of(range(13))) == Hit()


@dataclass
class Naive:
    """Which prefixes may be hit, kept as plain tuples of tokens; it forgets nothing."""

    ends: set[tuple[int, ...]] = field(default_factory=set)

    def deepest(self, tokens: tuple[int, ...]) -> int:
        return max((len(end) for end in self.ends if len(end) < len(tokens) and tokens[: len(end)] == end), default=0)


PROMPTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=20).map(tuple), min_size=1, max_size=25)


@settings(deadline=None)
@given(PROMPTS, st.integers(1, 7))
def test_with_room_for_all_a_hit_is_the_deepest_checkpoint_on_the_path(prompts: list[tuple[int, ...]], every: int) -> None:
    cache, naive = cache_of(num_blocks=600, num_slots=300), Naive()
    for tokens in prompts:
        places = list(range(BLOCK * every, len(tokens), BLOCK * every))
        hit = compute(cache, tokens, places)
        assert hit.num_tokens == naive.deepest(tokens)
        naive.ends |= {tokens[:place] for place in (*places, len(tokens)) if place > hit.num_tokens}


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(5, 14), st.integers(1, 4))
def test_under_pressure_nothing_pinned_moves_and_everything_sums(data: st.DataObject, num_blocks: int, num_slots: int) -> None:
    """Every cached block remembers the tokens it stands for: a path that is hit must stand for the prompt's own."""
    cache = cache_of(num_blocks, num_slots)
    running: list[tuple[Holding, tuple[int, ...], int]] = []
    content: dict[int, tuple[int, ...]] = {}
    states: dict[int, tuple[int, ...]] = {}
    for _ in range(data.draw(st.integers(1, 25))):
        if running and data.draw(st.booleans()):
            holding, tokens, computed = running.pop(data.draw(st.integers(0, len(running) - 1)))
            assert all(content[block] == tokens[: len(content[block])] for block in holding.block_ids[: computed // BLOCK])
            if data.draw(st.booleans()):
                cache.commit(holding, len(tokens))
                content |= {block: tokens[: (i + 1) * BLOCK] for i, block in enumerate(holding.block_ids)}
                if (slot := cache.keep(holding, len(tokens))) is not None:
                    states[slot] = tokens
            cache.release(holding)
        else:
            tokens = tuple(data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=20)))
            prefix = prefix_of(tokens)
            hit = cache.match(prefix)
            assert hit.num_tokens < len(tokens)
            if hit.slot is not None:
                assert states[hit.slot] == tokens[: hit.num_tokens]
                last = hit.partial or hit.path[-1]
                assert content[last.block_id][: hit.num_tokens] == tokens[: hit.num_tokens]
            taken = cache.take(prefix, hit, -(-len(tokens) // BLOCK))
            if taken is not None:
                used = [block for h, _, _ in running for block in h.block_ids]
                assert not set(taken.block_ids[len(hit.path) :]) & set(used)
                computed = len(hit.path) * BLOCK + data.draw(st.integers(0, len(tokens) - len(hit.path) * BLOCK))
                content |= {block: tokens[: (i + 1) * BLOCK] for i, block in enumerate(taken.block_ids) if i >= len(hit.path)}
                cache.commit(taken, computed)
                running.append((taken, tokens, computed))
        assert cache.check([h for h, _, _ in running]) == []
    for holding, _, _ in running:
        cache.release(holding)
    assert cache.check([]) == []
    assert cache.can_allocate(num_blocks)
    assert cache.take(prefix_of(range(500, 500 + num_blocks * BLOCK)), Hit(), num_blocks) is not None


def test_giving_back_twice_is_a_bug_that_shows() -> None:
    cache = cache_of()
    _, holding = start(cache, range(10))
    cache.release(holding)
    cache.release(holding)  # it holds nothing any more
    assert cache.check([]) == []
    with pytest.raises(ValueError, match="not allocated"):
        cache._blocks.free([holding.block_ids[0]])
