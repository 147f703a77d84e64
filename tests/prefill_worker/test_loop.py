from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from prefill_worker.chunk_step import GiveWayError
from prefill_worker.inbox import AskTask, CancelTask, Drain, HandoffEnded, HandOver, MemoryQuiet, ReservationEnded, RouterGone
from prefill_worker.loop import PrefillLoop
from prefill_worker.prompt import LocalMemory, PrefillTask
from prefill_worker.prompts import PromptTable
from tandem.clock import FakeClock
from tandem.config import PrefillConfig
from tandem.errors import HandoffError, NoRoom, TandemError, TransferFailed
from tandem.mailbox import SessionHub
from tandem.request import Request, SamplingParams, ServiceClass, StopRules
from tandem.v1 import worker_pb2 as pb
from tests.fake_engine import FakeEngine
from transfer.handoff import HandoffResult, LeaseGrant

GRANT = LeaseGrant(peer_id="decode-1", lease_id="l", epoch=1, nonce=b"n" * 16, block_ids=(0, 1, 2), slot=0)
RESULT = HandoffResult(kv_bytes=10, state_bytes=20, kv_seconds=0.1, state_seconds=0.2)


@dataclass
class FakeHandoff:
    pushed: list[tuple[str, int | None, tuple[int, ...]]] = field(default_factory=list)
    finished: dict[str, object] | None = None
    on_done: Callable[[object], None] | None = None
    on_quiet: Callable[[], None] | None = None

    failure: HandoffError | None = None

    def push_kv(self, start_block: int, stop_block: int, layers: tuple[int, ...] | None = None) -> None:
        self.pushed.append(("kv", layers[0] if layers else None, tuple(range(start_block, stop_block))))

    def push_state(self, layer: int) -> None:
        self.pushed.append(("state", layer, ()))

    def finish(self, *, on_done: Callable[[object], None], **facts: object) -> None:
        self.finished, self.on_done = facts, on_done

    def abort(self, on_quiet: Callable[[], None]) -> None:
        assert self.on_quiet is None, "aborted twice"
        self.on_quiet = on_quiet


class Bench:
    """A loop with everything around it played by hand."""

    def __init__(self, event_loop: asyncio.AbstractEventLoop, chunk_tokens: int = 8, **engine: int) -> None:
        self.engine = FakeEngine(**engine)
        self.hub: SessionHub[pb.PrefillEvents] = SessionHub(pb.PrefillEvents)
        self.event_loop = event_loop
        self.outbox = self.hub.open("router", event_loop)
        self.reserved: list[PrefillTask] = []
        self.released: list[tuple[str, bool]] = []
        self.handoffs: dict[str, FakeHandoff] = {}
        self.clock = FakeClock()
        self.grants_at_once = False
        self.loop = PrefillLoop(self.engine, PrefillConfig(chunk_tokens=chunk_tokens), self, self, self.hub, self.clock)

    def reserve(self, task: PrefillTask) -> None:
        self.reserved.append(task)
        if self.grants_at_once:
            self.grant(task)

    def release(self, grant: LeaseGrant, reason: str, *, record_sent: bool = False) -> None:
        self.released.append((reason, record_sent))

    def begin(self, task: PrefillTask, grant: LeaseGrant, memory: LocalMemory) -> FakeHandoff:
        self.handoffs[task.request.request_id] = FakeHandoff()
        return self.handoffs[task.request.request_id]

    def place(
        self,
        name: str,
        num_tokens: int,
        max_new_tokens: int = 4,
        stop: frozenset[int] = frozenset(),
        kind: ServiceClass = ServiceClass.INTERACTIVE,
    ) -> PrefillTask:
        request = Request(name, tuple(range(num_tokens)), SamplingParams(), StopRules(max_new_tokens, stop), service_class=kind)
        task = PrefillTask(request, 1, "router", "decode-1", 0.0)
        self.loop.inbox.put(task)
        return task

    def grant(self, task: PrefillTask, outcome: LeaseGrant | TandemError = GRANT) -> None:
        self.loop.inbox.put(ReservationEnded(task.key, outcome))

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.loop.turn(wait_s=0.0)

    def events(self) -> pb.PrefillEvents:
        return self.event_loop.run_until_complete(self.outbox.take(0.0))

    @property
    def is_whole(self) -> bool:
        return self.engine.blocks.num_used == 0 and self.engine.slots.num_used == 0


@pytest.fixture
def bench(event_loop: asyncio.AbstractEventLoop) -> Bench:
    return Bench(event_loop)


def test_nothing_is_computed_without_a_reservation(bench: Bench) -> None:
    task = bench.place("a", 10)
    bench.turn(3)
    assert bench.reserved == [task]
    assert bench.engine.steps == []


def test_finished_blocks_leave_by_chunk_and_the_last_chunk_leaves_by_layer(bench: Bench) -> None:
    task = bench.place("a", 18)  # chunks of 8, 8, 2; blocks of 4: five blocks
    bench.turn()
    bench.grant(task)
    bench.turn(3)
    handoff = bench.handoffs["a"]
    assert handoff.pushed == [("kv", None, (0, 1)), ("kv", None, (2, 3)), ("state", 0, ()), ("kv", 1, (4,))]
    assert handoff.finished == {"num_positions": 18, "first_token": 18, "compute_done_s": 0.0}
    events = bench.events()
    assert [(e.index, e.token, e.finish_reason) for e in events.first_tokens] == [(0, 18, "")]
    assert not bench.is_whole
    bench.loop.inbox.put(HandoffEnded(task.key, RESULT))
    bench.turn()
    assert bench.is_whole
    assert bench.released == [("handed off", True)]
    assert [(h.kv_bytes, h.state_bytes) for h in bench.events().handoffs] == [(10, 20)]


def test_a_chunk_that_ends_inside_a_block_keeps_that_block_back(event_loop: asyncio.AbstractEventLoop) -> None:
    bench = Bench(event_loop, chunk_tokens=6)
    task = bench.place("a", 14)
    bench.turn()
    bench.grant(task)
    bench.turn(3)
    kv = [blocks for kind, _, blocks in bench.handoffs["a"].pushed if kind == "kv"]
    assert kv == [(0,), (1, 2), (3,)]


def test_a_single_token_request_needs_no_decode_worker(bench: Bench) -> None:
    bench.place("a", 5, max_new_tokens=1)
    bench.turn()
    assert bench.reserved == []
    events = bench.events()
    assert [(e.token, e.finish_reason) for e in events.first_tokens] == [(5, "length")]
    assert bench.is_whole


def test_a_first_token_that_stops_releases_the_lease(bench: Bench) -> None:
    task = bench.place("a", 5, stop=frozenset({5}))
    bench.turn()
    bench.grant(task)
    bench.turn()
    assert [e.finish_reason for e in bench.events().first_tokens] == ["stop"]
    assert not bench.is_whole
    bench.loop.inbox.put(MemoryQuiet(task.key))
    bench.turn()
    assert bench.is_whole
    assert bench.released == [("aborted", False)]


def test_several_prompts_share_a_step(bench: Bench) -> None:
    tasks = [bench.place("a", 3), bench.place("c", 9), bench.place("b", 3)]
    bench.turn()
    for task in tasks:
        bench.grant(task)
    bench.turn(2)
    assert [[len(c.tokens) for c in step] for step in bench.engine.steps] == [[3, 3, 2], [7]]


@pytest.mark.parametrize("when", ["waiting", "reserving", "running", "leaving"])
@pytest.mark.parametrize("message", ["cancel", "router gone"])
def test_a_cancelled_prompt_gives_everything_back(bench: Bench, when: str, message: str) -> None:
    blocker = bench.place("blocker", 16)
    bench.turn()
    task = bench.place("a", 20)
    if when == "waiting":
        bench.turn()
        assert bench.reserved == [blocker]
    bench.loop.inbox.put(CancelTask(blocker.key))
    bench.grant(blocker)
    bench.turn(2)
    if when in ("running", "leaving"):
        bench.grant(task)
        bench.turn(1 if when == "running" else 3)
    steps = len(bench.engine.steps)
    bench.loop.inbox.put(CancelTask(task.key) if message == "cancel" else RouterGone("router"))
    if when in ("waiting", "reserving"):
        bench.turn()
        bench.grant(task)
    bench.turn()
    assert len(bench.engine.steps) == steps
    if when in ("running", "leaving"):
        assert not bench.is_whole
        bench.loop.inbox.put(MemoryQuiet(task.key))
        bench.turn()
    assert bench.is_whole


def test_only_the_chunk_that_runs_when_the_cancel_comes_is_wasted(bench: Bench) -> None:
    task = bench.place("a", 40)
    bench.turn()
    bench.grant(task)
    forward = bench.engine.forward

    def cancelled_meanwhile(*args: Any, **kwargs: Any) -> Any:
        bench.loop.waste.gone(task.key)
        bench.loop.inbox.put(CancelTask(task.key))
        return forward(*args, **kwargs)

    bench.turn()
    assert bench.loop.load().wasted_chunks == 0
    bench.engine.forward = cancelled_meanwhile  # type: ignore[method-assign]
    bench.turn(3)
    load = bench.loop.load()
    assert (len(bench.engine.steps), load.wasted_chunks, load.worst_wasted_chunks) == (2, 1, 1)


def test_a_decode_worker_that_does_not_answer_does_not_hold_up_the_prompts_of_others(bench: Bench) -> None:
    stuck, other = bench.place("stuck", 32), bench.place("other", 40)
    bench.turn()
    assert bench.reserved == [stuck]
    bench.clock.advance(1.0)
    bench.turn()
    assert bench.reserved == [stuck, other]


def test_a_draining_worker_finishes_what_has_memory_and_gives_the_rest_back_at_once(bench: Bench) -> None:
    computing, waiting = bench.place("computing", 16), bench.place("waiting", 20)
    bench.turn()
    bench.grant(computing)
    bench.loop.inbox.put(Drain())
    late = bench.place("late", 4)
    bench.turn(20)
    events = bench.events()
    assert [(f.request_id, f.kind, f.retryable) for f in events.failed] == [
        (waiting.request.request_id, "Leaving", True),
        (late.request.request_id, "Leaving", True),
    ]
    assert [t.request_id for t in events.first_tokens] == ["computing"]
    assert bench.reserved == [computing]


@pytest.mark.parametrize("when", ["reserving", "running", "leaving"])
def test_what_is_handed_over_is_told_its_router_and_gives_everything_back(bench: Bench, when: str) -> None:
    task = bench.place("a", 12)
    bench.turn()
    if when != "reserving":
        bench.grant(task)
        bench.turn(1 if when == "running" else 2)
    bench.loop.inbox.put(HandOver())
    bench.turn()
    if when == "reserving":
        bench.grant(task)
        bench.turn()
    else:
        bench.loop.inbox.put(MemoryQuiet(task.key))
        bench.turn()
    assert [(f.request_id, f.kind) for f in bench.events().failed] == [("a", "Leaving")]
    assert bench.is_whole


def test_memory_of_a_failed_handoff_waits_for_quiet(bench: Bench) -> None:
    task = bench.place("a", 4)
    bench.turn()
    bench.grant(task)
    bench.turn()
    bench.loop.inbox.put(HandoffEnded(task.key, TransferFailed("a write did not complete")))
    bench.turn()
    failed = bench.events().failed
    assert [(f.kind, f.retryable) for f in failed] == [("TransferFailed", True)]
    assert not bench.is_whole
    bench.loop.inbox.put(CancelTask(task.key))
    bench.turn()
    bench.loop.inbox.put(MemoryQuiet(task.key))
    bench.turn()
    assert bench.is_whole


def test_a_refused_reservation_is_reported_and_frees_local_memory(bench: Bench) -> None:
    task = bench.place("a", 4)
    bench.turn()
    bench.grant(task, NoRoom("no state slot free"))
    bench.turn()
    assert [(f.kind, f.retryable) for f in bench.events().failed] == [("NoRoom", True)]
    assert bench.is_whole


def test_a_prompt_whose_first_token_cannot_be_drawn_ends_alone(bench: Bench) -> None:
    good, bad = bench.place("a", 4), bench.place("b", 4)
    bench.turn()
    bench.grant(good)
    bench.grant(bad)
    bench.engine.spoilt_rows = {1}
    bench.turn()
    events = bench.events()
    assert [t.request_id for t in events.first_tokens] == ["a"]
    assert [(f.request_id, f.retryable) for f in events.failed] == [("b", True)]


def test_a_failed_step_ends_its_prompts_and_not_the_worker(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    first = bench.place("a", 4)
    bench.turn()
    bench.engine.fail_next = True
    bench.grant(first)
    bench.turn()
    assert [(f.request_id, f.retryable) for f in bench.events().failed] == [("a", True)]
    assert "prefill step over 1 prompts failed" in caplog.text
    bench.loop.inbox.put(MemoryQuiet(first.key))
    second = bench.place("b", 4)
    bench.turn()
    bench.grant(second)
    bench.turn()
    assert [t.request_id for t in bench.events().first_tokens] == ["b"]


def test_a_task_placed_twice_is_computed_once(bench: Bench) -> None:
    task = bench.place("a", 4)
    bench.loop.inbox.put(task)
    bench.turn()
    assert bench.reserved == [task]


def test_a_prompt_larger_than_the_pool_is_refused_at_once(bench: Bench) -> None:
    bench.place("a", 4 * 32 + 1)
    bench.turn()
    assert [f.kind for f in bench.events().failed] == ["NoRoom"]


def test_prompts_wait_for_local_memory(event_loop: asyncio.AbstractEventLoop) -> None:
    bench = Bench(event_loop, num_slots=1)
    first, second = bench.place("a", 4), bench.place("b", 4)
    bench.turn()
    assert bench.reserved == [first]
    bench.grant(first)
    bench.turn()
    bench.loop.inbox.put(HandoffEnded(first.key, RESULT))
    bench.turn()
    assert bench.reserved == [first, second]


def test_a_prompt_whose_handoff_has_failed_is_not_computed_to_its_end(bench: Bench) -> None:
    task = bench.place("a", 40)
    bench.turn()
    bench.grant(task)
    bench.turn()
    bench.handoffs["a"].failure = TransferFailed("the connection broke")
    bench.turn(3)
    assert len(bench.engine.steps) == 1
    assert [f.kind for f in bench.events().failed] == ["TransferFailed"]
    bench.loop.inbox.put(MemoryQuiet(task.key))
    bench.turn()
    assert bench.is_whole


def test_a_grant_that_cannot_be_used_is_given_back(bench: Bench) -> None:
    def refuse(*_: object) -> FakeHandoff:
        raise TransferFailed("the peer is not connected")

    bench.begin = refuse  # type: ignore[method-assign]
    bench.place("a", 4)
    bench.turn()
    bench.grant(bench.reserved[0])
    bench.turn()
    assert bench.is_whole
    assert bench.released == [("the peer is not connected", False)]
    assert [f.retryable for f in bench.events().failed] == [True]


def test_a_router_that_asks_is_told_whether_its_task_is_here_at_every_point_of_its_life(
    event_loop: asyncio.AbstractEventLoop,
) -> None:
    bench = Bench(event_loop, chunk_tokens=8)
    known = []

    def ask() -> None:
        bench.loop.inbox.put(AskTask(("a", 1), "router"))
        bench.turn()
        known.extend(standing.known for standing in bench.events().standings)

    ask()  # never heard of it
    task = bench.place("a", 24)
    ask()  # its reservation is asked for
    bench.grant(task)
    ask()  # it is computed
    ask()
    ask()  # its hand-off is under way
    bench.loop.inbox.put(HandoffEnded(task.key, RESULT))
    ask()  # it is over
    assert known == [False, True, True, True, True, False]


def test_an_idle_worker_tells_once_of_what_is_missing_with_the_prompt_that_had_it(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    task = bench.place("a", 5)
    bench.turn()
    bench.grant(task)
    bench.turn()
    bench.loop.inbox.put(HandoffEnded(task.key, RESULT))
    bench.turn(2)
    assert bench.loop.load().pool_mismatches == 0
    (stolen,) = bench.engine.slots.allocate(1)
    bench.turn(3)
    assert caplog.text.count("the pools do not sum") == 1
    assert f"slot {stolen} is missing; last held by request a, attempt 1: taken at" in caplog.text
    assert "lease l of decode-1 granted at 0.000 s, freed at 0.000 s" in caplog.text
    assert bench.loop.load().pool_mismatches == 1


def test_a_prompt_that_fails_ends_the_decode_workers_lease_as_soon_as_nothing_is_in_flight(bench: Bench) -> None:
    task = bench.place("a", 4)
    bench.turn()
    bench.engine.fail_next = True
    bench.grant(task)
    bench.turn()
    assert bench.handoffs["a"].on_quiet is not None
    assert bench.released == []
    bench.handoffs["a"].on_quiet()
    bench.turn()
    assert bench.released == [("aborted", False)]
    assert bench.is_whole


def test_prefill_for_a_client_that_has_gone_stops_at_the_next_chunk(bench: Bench) -> None:
    task = bench.place("a", 80)  # ten chunks
    bench.turn()
    bench.grant(task)
    bench.turn(3)
    bench.loop.inbox.put(CancelTask(task.key))
    bench.turn(5)
    assert len(bench.engine.steps) == 3


def test_steps_tokens_and_hand_offs_are_measured(bench: Bench) -> None:
    task = bench.place("a", 18)
    bench.turn()
    bench.grant(task)
    bench.turn(3)
    bench.loop.inbox.put(HandoffEnded(task.key, RESULT))
    bench.turn()
    measured = bench.loop.measures.series()
    assert measured["prefill_tokens", ("interactive",)].total == 18
    assert sum(measured["prefill_step_seconds", ("all", "1", "all")].counts) == 3
    assert measured["transfer_bytes", ("kv",)].total == RESULT.kv_bytes
    assert measured["transfer_seconds", ("state", "128", "1", "interactive")].total == RESULT.state_seconds
    assert not any(name == "prefix_cache_hit_tokens" for name, _ in measured)


class Suspended:
    """A batch prompt whose step has reached its first layer; `act` runs there, once, before the loop looks for newcomers."""

    def __init__(self, bench: Bench, act: Callable[[], object]) -> None:
        self.task = bench.place("batch", 16, kind=ServiceClass.BATCH)
        bench.turn()
        bench.grant(self.task)
        bench.grants_at_once = True
        forward, acts = bench.engine.forward, [act]

        def interrupted(chunks: Any, on_layer: Any, give_way: Any) -> Any:
            def with_act() -> None:
                if acts:
                    acts.pop()()
                give_way()

            return forward(chunks, on_layer, with_act if give_way else None)

        bench.engine.forward = interrupted  # type: ignore[method-assign]


def test_an_interactive_prompt_waits_for_a_part_of_a_batch_step_not_for_its_end(bench: Bench) -> None:
    def come() -> None:
        bench.place("soon", 5)

    suspended = Suspended(bench, come)
    bench.turn()
    assert [[len(chunk.tokens) for chunk in step] for step in bench.engine.steps] == [[8], [5]]
    # The first one's step had begun and its end is told later: what is told in this turn is the newcomer's token.
    assert [event.request_id for event in bench.events().first_tokens] == ["soon"]
    bench.turn()
    assert [event.request_id for event in bench.events().first_tokens] == [suspended.task.request.request_id]


def test_a_suspended_prompt_is_cancelled_after_its_step(bench: Bench) -> None:
    def cancel() -> None:
        bench.loop.inbox.put(CancelTask(suspended.task.key))
        bench.place("soon", 5)

    suspended = Suspended(bench, cancel)
    bench.turn(3)
    assert [[len(chunk.tokens) for chunk in step] for step in bench.engine.steps] == [[8], [5]]
    quiet = bench.handoffs["batch"].on_quiet
    assert quiet is not None
    quiet()
    bench.loop.inbox.put(HandoffEnded(("soon", 1), RESULT))
    bench.turn()
    assert bench.is_whole


def test_nothing_overtakes_the_end_of_a_routers_session(bench: Bench) -> None:
    def gone() -> None:
        bench.loop.inbox.put(RouterGone("router"))
        bench.place("of its next session", 5)

    Suspended(bench, gone)
    bench.turn()
    assert [[len(chunk.tokens) for chunk in step] for step in bench.engine.steps] == [[8]]
    bench.turn(2)
    assert [[len(chunk.tokens) for chunk in step] for step in bench.engine.steps] == [[8], [5]]


def test_where_a_step_gives_way_a_long_queue_costs_nothing_without_news(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    works = PromptTable.works
    monkeypatch.setattr(PromptTable, "works", lambda table: looks.append(1) or works(table))
    Suspended(bench, lambda: None)
    forward = bench.engine.forward

    def with_many_layers(chunks: Any, on_layer: Any, give_way: Any) -> Any:
        for _ in range(200):
            give_way()
        return forward(chunks, on_layer, give_way)

    bench.engine.forward = with_many_layers  # type: ignore[method-assign]
    looks.clear()
    bench.turn()
    assert len(looks) == 2  # the step's own plan, and the first look for newcomers


def test_who_gives_way_is_not_to_blame_for_what_fails_meanwhile(bench: Bench) -> None:
    suspended = Suspended(bench, lambda: bench.loop.inbox.put(ReservationEnded(("nobody", 1), NoRoom("full"))))
    with pytest.raises(GiveWayError):
        bench.turn()
    assert suspended.task.key in {prompt.task.key for prompt in bench.loop._prompts.running}
    assert not bench.events().failed


def test_batch_keeps_its_share_of_the_tokens_while_interactive_prompts_have_work(bench: Bench) -> None:
    """Of a step of 8 batch tokens at a share of a tenth, 72 interactive ones may come within it."""
    Suspended(bench, lambda: [bench.place("long", 93)])
    bench.turn()
    steps = [[len(chunk.tokens) for chunk in step] for step in bench.engine.steps]
    assert steps[0] == [8]
    assert sum(sum(step) for step in steps[1:]) == 72


def test_the_load_tells_the_pace_of_prompts_and_of_reservations_that_found_room_at_once(bench: Bench) -> None:
    assert (bench.loop.load().token_seconds, bench.loop.load().reserve_seconds) == (0.0, 0.0)
    first, second = bench.place("a", 4), bench.place("b", 4)
    bench.turn()
    bench.clock.advance(0.05)
    bench.grant(first)
    bench.turn()
    bench.clock.advance(5.0)  # it waited for room, as the prompt would anywhere
    bench.grant(second)
    bench.turn()
    assert bench.loop.load().reserve_seconds == pytest.approx(0.05)
