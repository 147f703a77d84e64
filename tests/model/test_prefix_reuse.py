"""A prompt that takes up another's work gives the logits of one that was computed whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prefill_worker.memory import PromptMemory
from prefill_worker.prompt import LocalMemory, PrefillTask, RunningPrompt
from prefill_worker.scheduler import PrefillPolicy, Work, plan_step
from tandem.cache.budget import PoolSizes
from tandem.cache.memory import CacheMemory
from tandem.cache.pool import IndexPool
from tandem.config import PrefillConfig
from tandem.engine import Engine
from tandem.model.batch import SequenceChunk
from tandem.model.load import LoadedModel
from tandem.request import Request, SamplingParams, StopRules
from tests.model.variants import Variant, load, relative_error

NUM_SLOTS = 2
LONGEST = 900
LONG = torch.randint(0, 96, (LONGEST,), generator=torch.Generator().manual_seed(4)).tolist()


def engine_of(loaded: LoadedModel, block_size: int, num_tokens: int, num_checkpoints: int) -> Engine:
    specs = loaded.model.cache_specs(block_size)
    num_blocks = 1 + -(-num_tokens // block_size)
    return Engine(
        loaded=loaded,
        memory=CacheMemory.allocate(specs, PoolSizes(num_blocks, NUM_SLOTS + num_checkpoints)),
        blocks=IndexPool(num_blocks, "KV blocks"),
        slots=IndexPool(NUM_SLOTS, "state slots"),
        device="cpu",
    )


@dataclass(frozen=True)
class Absorbed:
    """A prompt's outcome: how much of it was found, the logits of its last position, and what decode is handed."""

    hit_tokens: int
    logits_V: torch.Tensor
    kv: tuple[torch.Tensor, ...]
    states: tuple[torch.Tensor, ...]

    def has_the_bits_of(self, other: Absorbed) -> bool:
        mine, theirs = (self.logits_V, *self.kv, *self.states), (other.logits_V, *other.kv, *other.states)
        return all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def absorb(engine: Engine, memory: PromptMemory, tokens: Sequence[int], policy: PrefillPolicy) -> Absorbed:
    """By the scheduler's chunks; everything is freed."""
    request = Request("r", tuple(tokens), SamplingParams(), StopRules(1))
    task = PrefillTask(request, 1, "router", "decode", 0.0)
    taken = memory.take(task)
    assert isinstance(taken, LocalMemory)
    prompt = RunningPrompt(task, taken, None, None, num_computed=taken.num_cached, tokens=request.tokens)
    hidden = torch.empty(0)
    while prompt.num_remaining:
        work = Work(prompt.num_computed, prompt.num_remaining, prompt.num_to_stop)
        [plan] = plan_step([work], policy).chunks
        new = prompt.tokens[prompt.num_computed : prompt.num_computed + plan.num_tokens]
        hidden = engine.forward([SequenceChunk(new, prompt.num_computed, taken.block_ids, taken.slot)])
        prompt.num_computed += plan.num_tokens
        memory.computed(taken, prompt.num_computed)
    saved = engine.memory.save(taken.block_ids, taken.slot)
    kv = tuple(blocks.transpose(0, 1).flatten(1, 2)[:, : len(tokens)] for blocks in saved.kv)
    memory.free(taken)
    assert memory.mismatches() == []
    return Absorbed(taken.num_cached, engine.logits(hidden[-1:])[0], kv, saved.states)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(["equal heads", "uneven layers"]),
    block_size=st.sampled_from([1, 4, 7, 16]),
    chunk_tokens=st.integers(1, 90),
    tile_tokens=st.sampled_from([1, 16, 256]),
    ends=st.booleans(),
    every=st.integers(1, 80),
    num_checkpoints=st.integers(1, 6),
    turns=st.lists(st.tuples(st.integers(0, 150), st.integers(1, 90), st.integers(0, 2)), min_size=1, max_size=4),
)
def test_hits_of_any_length_give_the_logits_of_the_whole_prompt(
    variant: Callable[[str], Variant],
    tokens_500: list[int],
    name: str,
    block_size: int,
    chunk_tokens: int,
    tile_tokens: int,
    ends: bool,
    every: int,
    num_checkpoints: int,
    turns: list[tuple[int, int, int]],
) -> None:
    """Every prompt shares some of the one before it, at any place, and pools are so small that things go."""
    loaded = variant(name).loaded
    engine = engine_of(loaded, block_size, 240, num_checkpoints)
    memory = PromptMemory(engine, PrefillConfig(checkpoint_every_tokens=every, checkpoint_ends=ends))
    whole = engine_of(loaded, block_size, 240, 0)
    plain = PromptMemory(whole, PrefillConfig())
    prompt: list[int] = []
    for shared, new, salt in turns:
        prompt = prompt[:shared] + [(token + salt) % 96 for token in tokens_500[shared : shared + new]]
        got = absorb(engine, memory, prompt, PrefillPolicy(chunk_tokens, tile_tokens))
        want = absorb(whole, plain, prompt, PrefillPolicy(240))
        assert want.hit_tokens == 0
        assert relative_error(got.logits_V, want.logits_V) < 1e-4


@pytest.mark.parametrize("block_size", [4, 7])
def test_the_next_turn_computes_what_is_new(variant: Callable[[str], Variant], tokens_500: list[int], block_size: int) -> None:
    engine = engine_of(variant("equal heads").loaded, block_size, 200, 4)
    memory = PromptMemory(engine, PrefillConfig())
    hits = [absorb(engine, memory, tokens_500[:length], PrefillPolicy(64)).hit_tokens for length in (50, 90, 91, 91)]
    assert hits == [0, 50, 90, 90]


@pytest.mark.slow
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(["equal heads", "uneven layers"]),
    block_size=st.sampled_from([16, 32]),
    chunk_tokens=st.sampled_from([100, 256, 300, 700]),
    tiles_apart=st.integers(1, 2),
    turns=st.lists(st.tuples(st.integers(0, 900), st.integers(1, 600)), min_size=2, max_size=4),
)
def test_in_bf16_a_found_prefix_changes_no_bit_when_states_are_kept_at_tiles(
    variant: Callable[[str], Variant],
    name: str,
    block_size: int,
    chunk_tokens: int,
    tiles_apart: int,
    turns: list[tuple[int, int]],
) -> None:
    """Neither of the logits nor of the KV and state that decode is handed; so none of the answer."""
    loaded = load(variant(name).folder, "bfloat16")
    found, computed = (engine_of(loaded, block_size, LONGEST, count) for count in (8, 0))
    config = PrefillConfig(checkpoint_ends=False, checkpoint_every_tokens=tiles_apart * found.tile_tokens)
    with_cache, without = PromptMemory(found, config), PromptMemory(computed, config)
    policy = PrefillPolicy(chunk_tokens, found.tile_tokens)
    prompt = list(LONG)
    for shared, new in turns:
        prompt = (prompt[:shared] + LONG[shared : shared + new])[:LONGEST]
        prompt[-1] = new % 96
        got, want = absorb(found, with_cache, prompt, policy), absorb(computed, without, prompt, policy)
        assert got.has_the_bits_of(want), (got.hit_tokens, len(prompt))


def test_states_kept_at_tiles_are_found(variant: Callable[[str], Variant]) -> None:
    """The test above would prove nothing without hits."""
    engine = engine_of(load(variant("equal heads").folder, "bfloat16"), 32, LONGEST, 8)
    assert engine.tile_tokens == 256
    memory = PromptMemory(engine, PrefillConfig(checkpoint_ends=False, checkpoint_every_tokens=256))
    policy = PrefillPolicy(300, engine.tile_tokens)
    hits = [absorb(engine, memory, LONG[:length], policy).hit_tokens for length in (300, 600, 900, 900)]
    assert hits == [0, 256, 512, 512]  # of eight slots one prompt keeps two at most, so the longest has every second tile
