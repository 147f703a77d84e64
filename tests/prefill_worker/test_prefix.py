"""What the step loop does with a prompt of which a part was computed before."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from prefill_worker.inbox import AbsorbAnswer, CancelTask, HandoffEnded, MemoryQuiet
from prefill_worker.memory import PromptMemory
from prefill_worker.prompt import PrefillTask
from tandem.config import PrefillConfig
from tandem.request import Request, SamplingParams, StopRules
from tests.fake_engine import FakeEngine
from tests.prefill_worker.test_loop import RESULT, Bench

VOCABULARY = 99


@pytest.fixture
def bench() -> Iterator[Bench]:
    loop = asyncio.new_event_loop()
    yield Bench(loop, num_blocks=32, num_slots=4, num_checkpoints=3)
    loop.close()


def serve(bench: Bench, name: str, num_tokens: int) -> PrefillTask:
    """One prompt, from placement to a finished hand-off."""
    task = bench.place(name, num_tokens)
    bench.turn()
    bench.grant(task)
    bench.turn(1 + num_tokens // 8)
    bench.loop.inbox.put(HandoffEnded(task.key, RESULT))
    bench.turn()
    return task


def answer_of(name: str, num_prompt: int, num_answer: int) -> AbsorbAnswer:
    tokens = tuple(range(num_prompt + num_answer))
    stop = StopRules(num_answer + 1)
    request = Request(name, tokens[:num_prompt], SamplingParams(), stop, generated=tokens[num_prompt:])
    return AbsorbAnswer(PrefillTask(request, 1, "router", "", 0.0))


def held(bench: Bench) -> int:
    return bench.loop.load().kv_blocks_used


def test_a_hit_takes_over_the_state_and_sends_the_cached_blocks_before_it_computes(bench: Bench) -> None:
    serve(bench, "a", 10)
    assert held(bench) == 0
    assert bench.loop.pool_mismatches() == []
    bench.engine.steps.clear()
    bench.engine.copies.clear()
    task = bench.place("b", 20)
    bench.turn()
    bench.grant(task)
    bench.loop._receive(0.0)
    assert bench.handoffs["b"].pushed == [("kv", None, (0, 1))]
    bench.turn(2)
    assert [(c.context_tokens, len(c.tokens)) for [c] in bench.engine.steps] == [(10, 8), (18, 2)]
    assert [kind for kind, _, _ in bench.engine.copies] == ["block", "slot", "slot"]  # taken over twice, then kept
    assert bench.handoffs["b"].finished is not None
    assert [first.cached_tokens for first in bench.events().first_tokens] == [0, 10]


def test_where_every_bit_counts_nothing_of_a_tile_that_is_not_full_is_shared() -> None:
    for at_ends, num_kept in ((True, 8), (False, 6)):  # blocks of 4
        engine = FakeEngine(num_checkpoints=4)
        engine.tile_tokens = 8
        memory = PromptMemory(engine, PrefillConfig(checkpoint_every_tokens=16, checkpoint_ends=at_ends))
        request = Request("a", tuple(range(30)), SamplingParams(), StopRules(1))
        held = memory.take(PrefillTask(request, 1, "router", "decode-1", 0.0))
        assert held is not None
        for num_tokens in (16, 30):
            memory.computed(held, num_tokens)
        memory.free(held)
        assert engine.blocks.num_used == num_kept
        assert memory.mismatches() == []


def test_shared_blocks_wait_for_quiet_like_all_others(bench: Bench) -> None:
    serve(bench, "a", 10)
    task = bench.place("b", 20)
    bench.turn()
    bench.grant(task)
    bench.turn()
    bench.loop.inbox.put(CancelTask(task.key))
    bench.turn()
    greedy = bench.place("c", 4 * 32)  # all blocks there are
    bench.turn()
    assert bench.reserved[-1] is not greedy
    bench.loop.inbox.put(MemoryQuiet(task.key))
    bench.turn()
    assert bench.reserved[-1] is greedy


def test_chunks_end_where_states_are_kept() -> None:
    loop = asyncio.new_event_loop()
    bench = Bench(loop, chunk_tokens=8, num_checkpoints=8)
    bench.loop._memory._policy = type(bench.loop._memory._policy)(12, at_ends=True, most_per_prompt=8)
    task = bench.place("a", 30)
    bench.turn()
    bench.grant(task)
    bench.turn(6)
    assert [len(chunk.tokens) for [chunk] in bench.engine.steps] == [8, 4, 8, 4, 6]
    assert bench.loop.load().prefixes.num_tokens == [30, 24, 12]
    loop.close()


def test_answers_are_absorbed_in_idle_time_only(bench: Bench) -> None:
    serve(bench, "a", 10)
    bench.engine.steps.clear()
    bench.loop.inbox.put(answer_of("a", 10, 6))
    task = bench.place("other", 5, max_new_tokens=1)
    bench.turn()
    assert [len(chunk.tokens) for [chunk] in bench.engine.steps] == [5]
    assert not bench.is_whole  # cached
    bench.turn(2)
    assert [(c.context_tokens, len(c.tokens)) for [c] in bench.engine.steps[1:]] == [(10, 6)]
    assert held(bench) == 0
    assert bench.loop.pool_mismatches() == []
    bench.events()
    serve(bench, "next", 20)
    assert [first.cached_tokens for first in bench.events().first_tokens] == [16]
    assert task.key not in bench.handoffs


def test_what_is_absorbed_gives_its_memory_to_a_prompt(bench: Bench) -> None:
    bench.loop._absorber._chunk_tokens = 4
    bench.loop.inbox.put(answer_of("a", 50, 10))
    bench.turn()
    assert held(bench) > 0
    task = bench.place("large", 4 * 32, max_new_tokens=1)
    bench.turn()
    assert bench.engine.steps[-1][0].context_tokens in (0, 4)
    assert bench.loop.load().running == 1
    bench.loop.inbox.put(CancelTask(task.key))
    bench.turn(2)
    assert held(bench) == 0
    assert bench.loop.pool_mismatches() == []


def test_absorbed_chunks_end_where_a_prompts_tiles_do(bench: Bench) -> None:
    bench.engine.tile_tokens = 16
    bench.loop._absorber._chunk_tokens = 4
    serve(bench, "a", 10)
    bench.engine.steps.clear()
    bench.loop.inbox.put(answer_of("a", 10, 40))
    bench.turn(5)
    assert [(c.context_tokens, len(c.tokens)) for [c] in bench.engine.steps] == [(10, 6), (16, 16), (32, 16), (48, 2)]


def test_a_prompt_that_comes_is_computed_within_a_step_of_what_is_absorbed(bench: Bench) -> None:
    bench.grants_at_once = True
    forward, acts = bench.engine.forward, [lambda: bench.place("soon", 5), lambda: bench.place("large", 4 * 32)]

    def interrupted(chunks: Any, on_layer: Any = None, give_way: Any = None) -> Any:
        def with_act() -> None:
            if acts:
                acts.pop(0)()
            give_way()

        return forward(chunks, on_layer, with_act if give_way else None)

    bench.engine.forward = interrupted  # type: ignore[method-assign]
    bench.loop.inbox.put(answer_of("a", 10, 6))
    bench.turn()
    assert [len(chunk.tokens) for [chunk] in bench.engine.steps] == [16, 5]
    # All blocks were asked for while some were in use by the step: it waits for its end.
    assert [task.request.request_id for task in bench.reserved] == ["soon"]
    bench.loop.inbox.put(HandoffEnded(("soon", 1), RESULT))
    bench.turn()
    assert [task.request.request_id for task in bench.reserved] == ["soon", "large"]


def test_a_prompt_within_anothers_step_is_computed_no_further_once_it_is_cancelled(bench: Bench) -> None:
    bench.grants_at_once = True
    forward = bench.engine.forward

    def interrupted(chunks: Any, on_layer: Any = None, give_way: Any = None) -> Any:
        if chunks[0].context_tokens == 8:  # the second of three chunks
            bench.loop.inbox.put(CancelTask(("soon", 1)))
        elif not bench.reserved:
            bench.place("soon", 24)
        return forward(chunks, on_layer, give_way)

    bench.engine.forward = interrupted  # type: ignore[method-assign]
    bench.loop.inbox.put(answer_of("a", 10, 6))
    bench.turn()
    assert [len(chunk.tokens) for [chunk] in bench.engine.steps] == [16, 8, 8]
    assert bench.handoffs["soon"].on_quiet is not None


def test_an_answer_whose_prompt_is_forgotten_is_left_alone(bench: Bench) -> None:
    bench.loop.inbox.put(answer_of("a", 600, 10))
    bench.turn(2)
    assert bench.engine.steps == []
    assert bench.loop.pool_mismatches() == []


def test_without_a_cache_nothing_is_absorbed() -> None:
    loop = asyncio.new_event_loop()
    bench = Bench(loop)
    bench.loop.inbox.put(answer_of("a", 10, 6))
    bench.turn(2)
    assert bench.engine.steps == []
    assert bench.is_whole
    loop.close()
