"""Chunks follow the link: within bounds, without going to and fro, and a last chunk hides the state."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prefill_worker.chunk_size import ChunkLimits, ChunkSizer, ChunkSizes, Pace, adapt
from prefill_worker.scheduler import PrefillPolicy, Work, plan_step
from transfer.handoff import HandoffResult

LIMITS = ChunkLimits(256, 2048, 256)
QUICK_LINK = Pace(compute_s=1e-3, kv_s=1e-5, state_s=0.05)
SECONDS = st.floats(1e-6, 1.0)
PACES = st.builds(Pace, SECONDS, st.floats(0.0, 1.0), st.floats(0.0, 10.0))


@given(PACES, st.integers(1, 5), st.integers(0, 4096))
def test_sizes_stay_within_their_bounds_and_come_to_rest(pace: Pace, times: int, last: int) -> None:
    """A pace that stays the same is answered once and for all."""
    sizes = ChunkSizes(LIMITS.most, last)
    for _ in range(times + 4):
        sizes = adapt(sizes, pace, LIMITS)
        assert LIMITS.least <= sizes.step_tokens <= LIMITS.most
        assert 0 <= sizes.last_tokens <= sizes.step_tokens - LIMITS.tile_tokens
    assert adapt(sizes, pace, LIMITS) == sizes


def test_a_link_that_cannot_keep_up_makes_chunks_smaller_and_one_with_time_lets_them_grow() -> None:
    sizes = ChunkSizes(2048)
    behind, between = Pace(1e-3, 1.1e-3, 0.0), Pace(1e-3, 0.7e-3, 0.0)
    assert adapt(sizes, behind, LIMITS).step_tokens == 1024
    assert adapt(ChunkSizes(1024), between, LIMITS).step_tokens == 1024
    assert adapt(ChunkSizes(1024), QUICK_LINK, LIMITS).step_tokens == 2048


@given(st.integers(0, 1000))
def test_small_changes_of_the_pace_change_nothing(last: int) -> None:
    """Hysteresis: the last chunk grows at once when it is too short, and shrinks when half of it would do."""
    wanted = adapt(ChunkSizes(2048), QUICK_LINK, LIMITS).last_tokens
    assert wanted == 51  # 0.05 s at 1.01 ms - 0.02 ms each
    after = adapt(ChunkSizes(2048, last), QUICK_LINK, LIMITS).last_tokens
    assert after == (last if wanted <= last <= 2 * wanted else wanted)


@given(st.integers(257, 5000), st.integers(0, 256), st.sampled_from([512, 1024]))
def test_a_prompt_cut_by_the_budget_leaves_its_last_chunk_long_enough(num_tokens: int, last: int, budget: int) -> None:
    """No step more than without, and every cut at a tile's end."""
    policy = PrefillPolicy(budget, 256, last_tokens=last)
    chunks, computed = [], 0
    while computed < num_tokens:
        (chunk,) = plan_step([Work(computed, num_tokens - computed, num_tokens - computed)], policy).chunks
        chunks.append(chunk.num_tokens)
        computed += chunk.num_tokens
        assert computed % 256 == 0 or computed == num_tokens
    assert len(chunks) == -(-num_tokens // budget)
    assert chunks[-1] >= min(last, num_tokens)


def test_a_place_where_the_state_is_kept_cuts_whatever_is_left() -> None:
    work = Work(num_computed=0, num_remaining=1025, num_to_stop=1024)
    assert plan_step([work], PrefillPolicy(2048, 256, last_tokens=300)).chunks[0].num_tokens == 1024


def sizer() -> ChunkSizer:
    return ChunkSizer.of(PrefillPolicy(1024, 256), kv_token_bytes=1000)


def test_nothing_changes_before_some_handoffs_were_seen_and_an_empty_one_says_nothing() -> None:
    sizes = sizer()
    sizes.computed(512, 0.5)
    for number in range(20):
        sizes.handed_off(HandoffResult(kv_bytes=0, state_bytes=10, kv_seconds=0.0, state_seconds=0.1))
        assert sizes.policy == PrefillPolicy(1024, 256), number


def test_what_was_seen_sets_the_sizes() -> None:
    sizes = sizer()
    for _ in range(8):
        assert sizes.policy.chunk_tokens == 1024
        sizes.computed(512, 0.512)
        # 1 ms of computation and 2 ms of link for a token.
        sizes.handed_off(HandoffResult(kv_bytes=100_000, state_bytes=10, kv_seconds=0.2, state_seconds=0.00995))
    assert (sizes.policy.chunk_tokens, sizes.policy.last_tokens) == (512, 100)
