from __future__ import annotations

import asyncio

import pytest

from decode_worker.inbox import CancelSequence, HandOver, RouterGone
from decode_worker.loop import DecodeLoop
from decode_worker.sequence import VerifiedSequence
from tandem.clock import FakeClock
from tandem.config import DecodeConfig
from tandem.errors import LeaseLost
from tandem.mailbox import SessionHub
from tandem.request import Request, SamplingParams, ServiceClass, StopRules
from tandem.v1 import worker_pb2 as pb
from tests.fake_engine import SPECS, FakeEngine
from transfer.lease import Lease, LeaseTable

TTL_S = 60.0


class Bench:
    """A decode loop with real leases and a fake engine; verification is played by hand."""

    def __init__(self, event_loop: asyncio.AbstractEventLoop, config: DecodeConfig) -> None:
        self.engine = FakeEngine(num_blocks=64, num_slots=8)
        self.clock = FakeClock()
        self.leases = LeaseTable(self.engine.blocks, self.engine.slots, SPECS, self.clock, TTL_S, epoch=1)
        self.hub: SessionHub[pb.DecodeEvents] = SessionHub(pb.DecodeEvents)
        self.event_loop = event_loop
        self.outboxes = {name: self.hub.open(name, event_loop) for name in ("router", "other")}
        self.loop = DecodeLoop(self.engine, config, self.leases, self.hub, self.clock)

    def reserve(
        self, name: str, *, prompt: int = 5, max_new_tokens: int = 4, router: str = "router", **request: object
    ) -> Lease:
        stop = StopRules(max_new_tokens, request.pop("stop", frozenset()))  # type: ignore[arg-type]
        wanted = Request(name, tuple(range(prompt)), SamplingParams(), stop, **request)  # type: ignore[arg-type]
        return self.leases.reserve(wanted, 1, router, "prefill-1")

    def verify(self, lease: Lease, first_token: int = 50) -> None:
        verified = self.leases.verified(lease.id, lease.epoch)
        self.loop.inbox.put(VerifiedSequence(verified, len(lease.request.tokens), first_token))

    def join(self, name: str, **kind: object) -> Lease:
        lease = self.reserve(name, **kind)  # type: ignore[arg-type]
        self.verify(lease)
        return lease

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.loop.turn(wait_s=0.0)

    def tokens(self, router: str = "router") -> dict[str, list[tuple[int, int, str]]]:
        events = self.event_loop.run_until_complete(self.outboxes[router].take(0.0))
        told: dict[str, list[tuple[int, int, str]]] = {}
        for event in events.tokens:
            told.setdefault(event.request_id, []).append((event.index, event.tokens[0], event.finish_reason))
        return told

    def failed(self, router: str = "router") -> list[pb.AttemptFailed]:
        return list(self.event_loop.run_until_complete(self.outboxes[router].take(0.0)).failed)

    @property
    def is_whole(self) -> bool:
        return self.leases.check() == [] and self.engine.blocks.num_used == 0 and self.engine.slots.num_used == 0


@pytest.fixture
def bench(event_loop: asyncio.AbstractEventLoop) -> Bench:
    return Bench(event_loop, DecodeConfig(max_batch=4, max_joins_per_step=2))


def test_a_sequence_counts_on_from_the_first_token_to_its_limit(bench: Bench) -> None:
    bench.join("a", prompt=5, max_new_tokens=4)
    bench.turn(5)
    assert bench.tokens() == {"a": [(1, 51, ""), (2, 52, ""), (3, 53, "length")]}
    assert [[(c.tokens, c.context_tokens) for c in step] for step in bench.engine.steps] == [
        [((50,), 5)],
        [((51,), 6)],
        [((52,), 7)],
    ]
    assert bench.is_whole


def test_a_resumed_sequence_counts_what_was_delivered_before(bench: Bench) -> None:
    lease = bench.reserve("a", prompt=5, max_new_tokens=5, generated=(7, 8))
    bench.verify(lease, first_token=9)
    bench.turn(3)
    assert bench.tokens() == {"a": [(3, 10, ""), (4, 11, "length")]}
    assert bench.engine.steps[0][0].context_tokens == 7


def test_a_stop_token_ends_the_sequence_and_is_delivered(bench: Bench) -> None:
    bench.join("a", max_new_tokens=50, stop=frozenset({52}))
    bench.turn(5)
    assert bench.tokens()["a"][-1] == (2, 52, "stop")
    assert bench.is_whole


def test_sequences_join_and_leave_at_any_step_with_bounded_joins(bench: Bench) -> None:
    for name, length in (("a", 3), ("b", 5), ("c", 2), ("d", 4), ("e", 3)):
        bench.join(name, max_new_tokens=length)
    bench.turn(8)
    assert [len(step) for step in bench.engine.steps] == [2, 4, 3, 3]
    assert {name: len(tokens) for name, tokens in bench.tokens().items()} == {"a": 2, "b": 4, "c": 1, "d": 3, "e": 2}
    assert bench.is_whole


def test_each_router_hears_of_its_own_sequences_only(bench: Bench) -> None:
    bench.join("a")
    bench.join("b", router="other")
    bench.turn()
    assert set(bench.tokens("router")) == {"a"}
    assert set(bench.tokens("other")) == {"b"}


@pytest.mark.parametrize("running", [False, True])
def test_a_cancelled_sequence_leaves_at_once_and_frees_its_memory(bench: Bench, running: bool) -> None:
    bench.join("a", max_new_tokens=40)
    bench.join("b", max_new_tokens=3)
    if running:
        bench.turn()
    bench.loop.inbox.put(CancelSequence(("a", 1)))
    bench.turn(4)
    tokens = bench.tokens()
    assert len(tokens.get("a", [])) == (1 if running else 0)
    assert tokens["b"][-1][2] == "length"
    assert bench.is_whole


def test_cancel_before_the_handoff_quarantines_until_the_writer_is_quiet(bench: Bench) -> None:
    lease = bench.reserve("a")
    bench.loop.inbox.put(CancelSequence(("a", 1)))
    bench.turn()
    assert not bench.is_whole
    assert bench.leases.counts_by_state()["quarantined"] == 1
    bench.leases.writer_quiet(lease.id, lease.epoch, "prefill-1")
    assert bench.is_whole


def test_the_sequences_of_a_router_that_went_away_end(bench: Bench) -> None:
    bench.join("a", max_new_tokens=40)
    bench.join("b", max_new_tokens=40, router="other")
    bench.turn()
    bench.loop.inbox.put(RouterGone(tuple(bench.leases.of_router("router"))))
    bench.turn(2)
    assert [len(step) for step in bench.engine.steps] == [2, 1, 1]


def test_what_a_router_reserved_after_its_session_ended_lives(bench: Bench) -> None:
    bench.join("a", max_new_tokens=40)
    gone = RouterGone(tuple(bench.leases.of_router("router")))
    bench.join("b", max_new_tokens=40)  # over its next session, before the loop hears of the end of the first
    bench.loop.inbox.put(gone)
    bench.turn(2)
    assert set(bench.tokens()) == {"b"}


def test_handing_over_ends_everything_with_a_reason_that_blames_nobody(bench: Bench) -> None:
    bench.join("running", max_new_tokens=40)
    bench.turn()
    awaited = bench.reserve("awaited")
    bench.loop.inbox.put(HandOver())
    bench.turn()
    assert {(f.request_id, f.kind, f.retryable) for f in bench.failed()} == {
        ("running", "Leaving", True),
        ("awaited", "Leaving", True),
    }
    bench.leases.writer_quiet(awaited.id, awaited.epoch, "prefill-1")
    assert bench.is_whole


def test_a_failed_step_ends_its_sequences_and_not_the_worker(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.join("a")
    bench.engine.fail_next = True
    bench.turn()
    assert "decode step over 1 sequences failed" in caplog.text
    assert bench.is_whole
    bench.join("b", max_new_tokens=2)
    bench.turn()
    assert bench.tokens() == {"b": [(1, 51, "length")]}


def test_a_row_without_finite_logits_ends_its_sequence_alone(bench: Bench) -> None:
    bench.join("a")
    bench.join("b")
    bench.turn()
    bench.tokens()
    bench.engine.spoilt_rows = {1}
    bench.turn()
    events = bench.event_loop.run_until_complete(bench.outboxes["router"].take(0.0))
    assert [(t.request_id, t.index) for t in events.tokens] == [("a", 2)]
    assert [(f.request_id, f.retryable) for f in events.failed] == [("b", True)]
    bench.engine.spoilt_rows = set()
    bench.turn()
    assert bench.tokens() == {"a": [(3, 53, "length")]}
    assert bench.is_whole


def test_an_idle_worker_tells_once_of_what_is_missing_with_the_lease_that_had_it(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    lease = bench.reserve("a")
    bench.leases.writer_quiet(lease.id, lease.epoch, "prefill-1")
    bench.turn()
    assert bench.loop.load().pool_mismatches == 0
    (stolen,) = bench.engine.blocks.allocate(1)
    assert stolen in lease.block_ids
    bench.turn(3)
    assert caplog.text.count("the pools do not sum") == 1
    assert (
        f"block {stolen} is missing; last held by lease {lease.id} of request a, attempt 1, writer prefill-1: " in caplog.text
    )
    assert "reserved at 0.000 s (reserve) → aborted at 0.000 s (writer quiet)" in caplog.text
    assert bench.loop.load().pool_mismatches == 1
    bench.engine.slots.allocate(8)
    bench.turn()
    assert "slot 7 is missing; none of the last 4096 leases held it" in caplog.text


def test_the_load_shows_leases_by_state_with_the_oldest_age(bench: Bench) -> None:
    bench.reserve("a")
    bench.clock.advance(3.0)
    bench.join("b")
    bench.clock.advance(1.0)
    load = bench.loop.load()
    assert (load.leases["reserved"], load.leases["verified"]) == (1, 1)
    assert (load.lease_ages["reserved"], load.lease_ages["verified"], load.lease_ages["running"]) == (4.0, 1.0, 0.0)


def test_a_cancel_that_comes_before_the_reservation_refuses_it(bench: Bench) -> None:
    bench.loop.inbox.put(CancelSequence(("a", 1)))
    bench.turn()
    with pytest.raises(LeaseLost, match="abandoned"):
        bench.reserve("a")
    assert bench.is_whole
    bench.join("b", max_new_tokens=2)
    bench.turn()
    assert bench.tokens() == {"b": [(1, 51, "length")]}


def test_a_cancel_that_crosses_the_last_token_frees_once_and_takes_nobody_elses_memory(bench: Bench) -> None:
    first = bench.join("a", max_new_tokens=2)
    bench.turn()
    assert bench.tokens() == {"a": [(1, 51, "length")]}
    second = bench.join("b", max_new_tokens=4)  # it got the memory that "a" has just left
    assert set(second.block_ids) & set(first.block_ids)
    bench.loop.inbox.put(CancelSequence(("a", 1)))
    bench.turn(3)
    assert bench.tokens()["b"][-1] == (3, 53, "length")
    assert bench.is_whole


def test_steps_and_tokens_are_measured_by_class(bench: Bench) -> None:
    bench.join("a", max_new_tokens=4)
    bench.join("b", max_new_tokens=3, service_class=ServiceClass.BATCH)
    bench.turn(4)
    measured = bench.loop.measures.series()
    assert measured["decode_tokens", ("interactive",)].total == 3
    assert measured["decode_tokens", ("batch",)].total == 2
    assert sum(measured["decode_step_seconds", ("all", "4", "all")].counts) == 2
    assert sum(measured["decode_step_seconds", ("all", "1", "all")].counts) == 1
    assert measured["decode_batch_size", ()].total == 5
