"""Short prompts that a decode worker computes itself: the others keep their cadence, and whatever happens nothing is left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from decode_worker.inbox import AskSequence, CancelSequence, ComputePrompt, HandOver, RouterGone
from decode_worker.local_prefill import LocalPrefill, require_place
from decode_worker.loop import DecodeLoop
from decode_worker.sequence import VerifiedSequence
from tandem.clock import FakeClock
from tandem.config import DecodeConfig
from tandem.errors import HandoffError, Overloaded
from tandem.mailbox import SessionHub
from tandem.model.batch import SequenceChunk
from tandem.request import OutputOptions, Request, SamplingParams, StopRules
from tandem.v1 import worker_pb2 as pb
from tests.fake_engine import SPECS, FakeEngine
from transfer.lease import Lease, LeaseTable
from transfer.lease_memory import AdmissionPolicy

LAYER_S = 0.01


class SlowEngine(FakeEngine):
    """A layer takes a while, and `between` may let something happen after each of a prompt."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(num_blocks=64, num_slots=8)
        self.tile_tokens = 16
        self.clock = clock
        self.between: Callable[[], None] = lambda: None

    def forward(
        self,
        chunks: Sequence[SequenceChunk],
        on_layer: Callable[[int], None] | None = None,
        give_way: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        def slowly(layer: int) -> None:
            self.clock.advance(LAYER_S)
            if give_way is not None:
                self.between()
                give_way()

        return super().forward(chunks, slowly)


class Bench:
    """A decode loop that computes prompts, with all that it tells its one router."""

    def __init__(self, event_loop: asyncio.AbstractEventLoop, share: float = 0.25, **policy: Any) -> None:
        self.clock = FakeClock()
        self.engine = SlowEngine(self.clock)
        admission = AdmissionPolicy(keep_prefixes=True, **policy)
        self.leases = LeaseTable(self.engine.blocks, self.engine.slots, SPECS, self.clock, 60.0, 1, admission, "fake")
        self.hub: SessionHub[pb.DecodeEvents] = SessionHub(pb.DecodeEvents)
        self.event_loop = event_loop
        self.outbox = self.hub.open("router", event_loop)
        config = DecodeConfig(max_batch=4, local_prefill_tokens=8, local_prefill_share=share)
        self.loop = DecodeLoop(self.engine, config, self.leases, self.hub, self.clock)  # type: ignore[arg-type]

    def place(self, name: str, *, prompt: int = 5, max_new_tokens: int = 4, **request: Any) -> Lease:
        wanted = Request(name, tuple(range(prompt)), SamplingParams(), StopRules(max_new_tokens), **request)
        lease = self.leases.reserve(wanted, 1, "router", "here", is_local=True)
        self.loop.inbox.put(ComputePrompt(lease))
        return lease

    def run(self, name: str, max_new_tokens: int = 100) -> Lease:
        """A sequence that was handed off, and runs."""
        wanted = Request(name, tuple(range(5)), SamplingParams(), StopRules(max_new_tokens))
        lease = self.leases.reserve(wanted, 1, "router", "prefill-1")
        self.loop.inbox.put(VerifiedSequence(self.leases.verified(lease.id, 1), 5, 50))
        self.turn()
        return lease

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.loop.turn(wait_s=0.0)

    def events(self) -> pb.DecodeEvents:
        return self.event_loop.run_until_complete(self.outbox.take(0.0))

    @property
    def is_whole(self) -> bool:
        nothing_used = self.leases.num_blocks_used() == self.engine.slots.num_used == 0
        return self.leases.check() == [] and nothing_used and not any(self.leases.counts_by_state().values())


@pytest.fixture
def bench(event_loop: asyncio.AbstractEventLoop) -> Bench:
    return Bench(event_loop)


def told(events: pb.DecodeEvents, name: str) -> list[tuple[int, int, str]]:
    first = [(f.index, f.token, f.finish_reason) for f in events.first_tokens if f.request_id == name]
    return first + [(t.index, t.tokens[0], t.finish_reason) for t in events.tokens if t.request_id == name]


def test_a_prompt_is_computed_from_nothing_and_its_answer_runs_on(bench: Bench) -> None:
    bench.place("a", prompt=5, max_new_tokens=4)
    bench.turn(5)
    events = bench.events()
    assert told(events, "a") == [(0, 5, ""), (1, 6, ""), (2, 7, ""), (3, 8, "length")]
    assert [(e.request_id, e.attempt) for e in events.started] == [("a", 1)]
    assert [(e.request_id, e.handoff_exposed_seconds) for e in events.ready] == [("a", 0.0)]
    first, second = bench.engine.steps[:2]
    assert (first[0].tokens, first[0].context_tokens) == ((0, 1, 2, 3, 4), 0)
    assert (second[0].tokens, second[0].context_tokens) == ((5,), 5)
    assert bench.is_whole


def test_a_resumed_answer_goes_on_after_what_was_delivered(bench: Bench) -> None:
    bench.place("a", prompt=3, max_new_tokens=5, generated=(7, 8))
    bench.turn(4)
    assert told(bench.events(), "a") == [(2, 9, ""), (3, 10, ""), (4, 11, "length")]
    assert bench.engine.steps[0][0].tokens == (0, 1, 2, 7, 8)


def test_a_first_token_that_ends_the_answer_frees_at_once_and_nothing_is_ready(bench: Bench) -> None:
    bench.place("a", max_new_tokens=1)
    bench.turn()
    events = bench.events()
    assert told(events, "a") == [(0, 5, "length")]
    assert not events.ready
    assert bench.is_whole


def test_pieces_end_where_a_prefill_worker_would_end_them(bench: Bench) -> None:
    bench.engine.tile_tokens = 4
    bench.place("a", prompt=9)
    bench.turn()
    assert [(s[0].tokens, s[0].context_tokens) for s in bench.engine.steps] == [
        ((0, 1, 2, 3), 0),
        ((4, 5, 6, 7), 4),
        ((8,), 8),
    ]


def test_prompts_are_computed_one_after_the_other_in_the_order_in_which_they_came(bench: Bench) -> None:
    for name in ("a", "b", "c"):
        bench.place(name, max_new_tokens=2)
    assert bench.loop.load().queue_tokens == 0
    bench.turn()
    assert (bench.loop.load().queue, bench.loop.load().queue_tokens) == (3, 10)  # "a" is verified
    bench.turn(5)
    assert [e.request_id for e in bench.events().started] == ["a", "b", "c"]
    assert bench.is_whole


def test_what_a_router_asked_for_is_told(bench: Bench) -> None:
    bench.place("a", prompt=4, max_new_tokens=2, output=OutputOptions(logprobs=1, prompt_logprobs=1))
    bench.turn(3)
    events = bench.events()
    (first,) = events.first_tokens
    assert first.HasField("logprobs")
    assert len(first.prompt_logprobs) == 3
    assert len(events.tokens[0].logprobs) == 1
    assert first.cached_tokens == 0


def test_a_resumed_answers_prompt_logprobs_were_told_before(bench: Bench) -> None:
    bench.place("a", prompt=3, max_new_tokens=5, generated=(7,), output=OutputOptions(prompt_logprobs=1))
    bench.turn()
    assert not bench.events().first_tokens[0].prompt_logprobs


# ---- the others ----


def test_running_sequences_step_within_a_prompt(bench: Bench) -> None:
    bench.run("r")
    bench.place("a")
    bench.turn()
    # A step that was due; a layer of the prompt, a step, the other layer, a step; the next turn's.
    assert [len(step[0].tokens) for step in bench.engine.steps[1:]] == [1, 5, 1, 1]
    tokens = told(bench.events(), "r")
    assert [index for index, _, _ in tokens] == [1, 2, 3, 4]


def test_a_prompt_gets_its_share_of_a_steps_time_and_no_more(event_loop: asyncio.AbstractEventLoop) -> None:
    bench = Bench(event_loop, share=1.0)
    bench.run("r")  # a step takes as long as two layers
    bench.place("a")
    bench.turn()
    assert [len(step[0].tokens) for step in bench.engine.steps[1:]] == [1, 5, 1]


def test_a_sequence_that_comes_meanwhile_joins_where_a_prompt_gives_way(bench: Bench) -> None:
    lease = bench.leases.reserve(Request("v", (1, 2), SamplingParams(), StopRules(9)), 1, "router", "prefill-1")
    bench.place("a")

    def verify() -> None:
        bench.engine.between = lambda: None
        bench.loop.inbox.put(VerifiedSequence(bench.leases.verified(lease.id, 1), 2, 50))

    bench.engine.between = verify
    bench.turn()
    assert told(bench.events(), "v")
    assert [len(step[0].tokens) for step in bench.engine.steps] == [5, 1, 1]


def test_a_step_that_fails_where_a_prompt_gives_way_ends_its_sequences_and_not_the_prompt(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.run("r")
    bench.place("a", max_new_tokens=2)

    def fail_once() -> None:
        bench.engine.between = lambda: None
        bench.engine.fail_next = True

    bench.engine.between = fail_once
    bench.turn(2)
    events = bench.events()
    assert [f.request_id for f in events.failed] == ["r"]
    assert told(events, "a") == [(0, 5, ""), (1, 6, "length")]
    assert "a decode step over 1 sequences failed" in caplog.text
    assert bench.is_whole


def test_a_prompt_that_cannot_be_computed_ends_alone(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.run("r")
    bench.place("a")
    bench.place("b", max_new_tokens=2)
    forward, refuses = bench.engine.forward, [True]

    def failing(chunks: Sequence[SequenceChunk], give_way: Callable[[], None] | None = None) -> torch.Tensor:
        if give_way is not None and refuses:
            refuses.clear()
            raise RuntimeError("scripted")
        return forward(chunks, give_way=give_way)

    bench.engine.forward = failing  # type: ignore[method-assign]
    bench.turn(5)
    events = bench.events()
    assert [(f.request_id, f.kind, f.retryable) for f in events.failed] == [("a", "HandoffError", True)]
    assert told(events, "b")[-1] == (1, 6, "length")
    assert told(events, "r")
    assert "the prompt of request a could not be computed here" in caplog.text


def test_a_prompt_without_finite_logits_ends_alone(bench: Bench) -> None:
    bench.engine.spoilt_rows = {0}
    bench.place("a")
    bench.turn()
    assert [(f.request_id, f.retryable) for f in bench.events().failed] == [("a", True)]
    assert bench.is_whole


def test_what_goes_wrong_with_the_loop_where_a_prompt_gives_way_is_not_the_prompts_fault(bench: Bench) -> None:
    bench.place("a")
    bench.loop._join = lambda: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(ZeroDivisionError):
        bench.turn()
    bench.loop._join = lambda: None  # type: ignore[method-assign]
    calls: list[int] = []

    def fail_between() -> None:
        calls.append(1)
        bench.loop._join = lambda: 1 / 0  # type: ignore[method-assign, assignment, return-value]

    bench.engine.between = fail_between
    with pytest.raises(Exception) as raised:  # noqa: PT011
        bench.turn()
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert calls == [1]


# ---- endings ----


def test_a_prompt_that_waits_is_dropped_with_its_cancel(bench: Bench) -> None:
    bench.place("a")
    bench.loop.inbox.put(CancelSequence(("a", 1)))
    bench.turn()
    assert bench.engine.steps == []
    assert bench.is_whole


ENDINGS: dict[str, Callable[[Bench], object]] = {
    "cancel": lambda bench: CancelSequence(("a", 1)),
    "router-gone": lambda bench: RouterGone(tuple(bench.leases.of_router("router"))),
    "hand-over": lambda bench: HandOver(),
}


@pytest.mark.parametrize("how", ENDINGS)
def test_whoever_ends_while_its_prompt_is_computed_keeps_its_memory_until_nobody_writes_it(bench: Bench, how: str) -> None:
    lease = bench.place("a")
    seen: list[str] = []

    def end() -> None:
        bench.engine.between = lambda: seen.append(bench.leases.get(lease.id, 1).state.value)
        bench.loop.inbox.put(ENDINGS[how](bench))  # type: ignore[arg-type]

    bench.engine.between = end
    bench.turn()
    assert seen == []  # it is computed no further than to the next layer
    assert [state.state.value for state in bench.leases.get(lease.id, 1).history] == ["reserved", "computing", "aborted"]
    events = bench.events()
    assert not events.first_tokens
    assert [f.kind for f in events.failed] == (["Leaving"] if how == "hand-over" else [])
    assert bench.is_whole


def test_memory_of_a_prompt_that_was_dropped_half_way_is_not_lost_to_another_while_it_is_written(bench: Bench) -> None:
    lease = bench.place("a")
    states: list[str] = []

    def end() -> None:
        bench.engine.between = lambda: None
        bench.loop.inbox.put(CancelSequence(("a", 1)))
        step = bench.loop._check_pools
        bench.loop._check_pools = lambda: (states.append(bench.leases.get(lease.id, 1).state.value), step())[1]  # type: ignore[method-assign, func-returns-value]

    bench.engine.between = end
    bench.turn()
    assert states == ["computing"]
    assert bench.is_whole


def test_a_cancel_after_the_last_layer_ends_it_too(bench: Bench) -> None:
    calls: list[int] = []

    def at_the_last() -> None:
        calls.append(1)
        if len(calls) == len(SPECS.layers):
            bench.loop.inbox.put(CancelSequence(("a", 1)))

    bench.engine.between = at_the_last
    bench.place("a")
    bench.turn(2)
    assert not bench.events().first_tokens
    assert bench.is_whole


def test_a_task_is_known_from_its_placement_to_its_end(bench: Bench) -> None:
    bench.loop.inbox.put(AskSequence(("a", 1), "router"))
    bench.place("a", max_new_tokens=2)
    bench.loop.inbox.put(AskSequence(("b", 1), "router"))
    bench.turn()
    bench.loop.inbox.put(AskSequence(("a", 1), "router"))
    bench.turn(2)
    bench.loop.inbox.put(AskSequence(("a", 1), "router"))
    bench.turn()
    standings = [(s.request_id, s.known) for s in bench.events().standings]
    assert standings == [("a", True), ("b", False), ("a", True), ("a", False)]


def test_a_prompt_computed_here_is_kept_as_one_that_was_handed_off(bench: Bench) -> None:
    bench.place("a", prompt=8, max_new_tokens=2)
    bench.turn(3)
    later = Request("b", tuple(range(8)), SamplingParams(), StopRules(2))
    assert bench.leases.reserve(later, 1, "router", "prefill-1", may_share=True).num_held > 0


def test_what_is_kept_is_never_written_by_a_prompt_computed_here(bench: Bench) -> None:
    bench.place("a", prompt=8, max_new_tokens=2)
    bench.turn(3)
    assert bench.place("b", prompt=8).num_held == 0
    bench.turn(5)
    assert bench.is_whole


# ---- measures ----


def test_the_load_tells_the_pace_without_the_turns_of_others(bench: Bench) -> None:
    assert bench.loop.load().token_seconds == 0.0
    bench.run("r")
    bench.place("a", prompt=5)
    bench.turn()
    load = bench.loop.load()
    assert load.token_seconds == pytest.approx(len(SPECS.layers) * LAYER_S / 5)
    assert (load.local_prefill_tokens, load.local_prefill_share) == (8, 0.25)
    assert bench.loop.measures.series()["local_prefill_tokens", ("interactive",)].total == 5


def test_a_pace_of_long_ago_is_forgotten(bench: Bench) -> None:
    bench.place("a", max_new_tokens=1)
    bench.turn()
    assert bench.loop.load().token_seconds > 0.0
    bench.clock.advance(61.0)
    assert bench.loop.load().token_seconds == 0.0


def test_prompts_that_are_too_long_or_too_many_are_refused() -> None:
    require_place(8, 24, most_tokens=8)
    with pytest.raises(HandoffError, match="9 tokens"):
        require_place(9, 0, most_tokens=8)
    with pytest.raises(Overloaded, match="25 prompt tokens wait"):
        require_place(8, 25, most_tokens=8)
    with pytest.raises(HandoffError, match="0 are the most"):
        require_place(1, 0, most_tokens=0)


def test_nothing_that_waits_is_counted_twice_while_one_is_computed() -> None:
    leases = [SimpleNamespace(id=str(i), request=SimpleNamespace(tokens=(1,) * (i + 1), request_id="r")) for i in range(2)]
    queue: Any = LocalPrefill(FakeEngine(), SimpleNamespace(), FakeClock())  # type: ignore[arg-type]
    queue.waiting.extend(leases)
    assert (queue.num_waiting, queue.num_waiting_tokens) == (2, 3)
    assert queue.forget({"0"}) == set()
    assert (queue.num_waiting, queue.num_waiting_tokens) == (1, 2)
