"""A prompt that takes up another's work gives the logits of one that was computed whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
from tests.model.variants import Variant, relative_error

NUM_SLOTS = 2


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


def last_logits(engine: Engine, memory: PromptMemory, tokens: Sequence[int], chunk_tokens: int) -> tuple[int, torch.Tensor]:
    """Hit tokens, and the logits of the prompt's last position; everything is freed."""
    request = Request("r", tuple(tokens), SamplingParams(), StopRules(1))
    task = PrefillTask(request, 1, "router", "decode", 0.0)
    taken = memory.take(task)
    assert isinstance(taken, LocalMemory)
    prompt = RunningPrompt(task, taken, None, None, num_computed=taken.num_cached, tokens=request.tokens)
    hidden = torch.empty(0)
    while prompt.num_remaining:
        work = Work(prompt.num_computed, prompt.num_remaining, prompt.num_to_stop)
        [plan] = plan_step([work], PrefillPolicy(chunk_tokens)).chunks
        new = prompt.tokens[prompt.num_computed : prompt.num_computed + plan.num_tokens]
        hidden = engine.forward([SequenceChunk(new, prompt.num_computed, taken.block_ids, taken.slot)])
        prompt.num_computed += plan.num_tokens
        memory.computed(taken, prompt.num_computed)
    memory.free(taken)
    assert memory.mismatches() == []
    return taken.num_cached, engine.logits(hidden[-1:])


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(["equal heads", "uneven layers"]),
    block_size=st.sampled_from([1, 4, 7, 16]),
    chunk_tokens=st.integers(1, 90),
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
    every: int,
    num_checkpoints: int,
    turns: list[tuple[int, int, int]],
) -> None:
    """Every prompt shares some of the one before it, at any place, and pools are so small that things go."""
    loaded = variant(name).loaded
    engine = engine_of(loaded, block_size, 240, num_checkpoints)
    memory = PromptMemory(engine, PrefillConfig(checkpoint_every_tokens=every))
    whole = engine_of(loaded, block_size, 240, 0)
    plain = PromptMemory(whole, PrefillConfig())
    prompt: list[int] = []
    for shared, new, salt in turns:
        prompt = prompt[:shared] + [(token + salt) % 96 for token in tokens_500[shared : shared + new]]
        _, got = last_logits(engine, memory, prompt, chunk_tokens)
        hit, want = last_logits(whole, plain, prompt, 240)
        assert hit == 0
        assert relative_error(got, want) < 1e-4


@pytest.mark.parametrize("block_size", [4, 7])
def test_the_next_turn_computes_what_is_new(variant: Callable[[str], Variant], tokens_500: list[int], block_size: int) -> None:
    engine = engine_of(variant("equal heads").loaded, block_size, 200, 4)
    memory = PromptMemory(engine, PrefillConfig())
    hits = [last_logits(engine, memory, tokens_500[:length], 64)[0] for length in (50, 90, 91, 91)]
    assert hits == [0, 50, 90, 90]
