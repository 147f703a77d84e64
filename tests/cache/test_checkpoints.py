from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.cache.checkpoints import CheckpointPolicy

POLICY = CheckpointPolicy(every_tokens=64, at_ends=True, most_per_prompt=4)


def test_a_short_prompt_leaves_its_end_only() -> None:
    assert POLICY.places(50, hit_tokens=0, kv_tokens=0, block_size_tokens=16) == (50,)


def test_a_long_prompt_leaves_regular_ones_further_apart_the_longer_it_is() -> None:
    assert POLICY.places(200, 0, 0, 16) == (64, 128, 192, 200)
    assert POLICY.places(1000, 0, 0, 16) == (256, 512, 768, 1000)


def test_where_another_prompt_left_the_path_a_checkpoint_is_taken() -> None:
    assert POLICY.places(100, hit_tokens=0, kv_tokens=48, block_size_tokens=16) == (48, 64, 100)
    assert POLICY.places(100, hit_tokens=32, kv_tokens=32, block_size_tokens=16) == (64, 100)


def test_only_regular_ones_when_every_bit_must_be_that_of_the_uncut_prompt() -> None:
    policy = CheckpointPolicy(64, at_ends=False, most_per_prompt=4)
    assert policy.places(100, 0, 48, 16) == (64,)
    assert policy.places(128, 0, 48, 16) == (64, 128)


def test_no_slots_no_places() -> None:
    assert CheckpointPolicy(64, at_ends=True, most_per_prompt=0).places(1000, 0, 0, 16) == ()


@settings(deadline=None)
@given(st.integers(1, 5000), st.integers(0, 5000), st.integers(0, 5000), st.sampled_from([1, 16, 32]), st.integers(1, 512))
def test_places_lie_after_the_hit_in_whole_blocks_but_the_end_and_are_bounded(
    num_tokens: int, hit: int, kv: int, block: int, every: int
) -> None:
    hit, kv = min(hit, num_tokens - 1), min(max(hit, kv) // block * block, num_tokens)
    places = CheckpointPolicy(every, at_ends=True, most_per_prompt=4).places(num_tokens, hit, kv, block)
    assert list(places) == sorted(set(places))
    assert all(hit < place <= num_tokens for place in places)
    assert all(place % block == 0 or place == num_tokens for place in places)
    assert len(places) <= 4 + 2
