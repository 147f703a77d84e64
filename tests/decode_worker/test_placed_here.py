"""Prompts that a router places on a decode worker: memory at once, or a refusal that says whether to try elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest

from decode_worker.worker import DecodeWorker
from tandem.clock import FakeClock
from tandem.config import DecodeConfig, WorkerConfig
from tandem.description import describe
from tandem.request import Request, SamplingParams, StopRules
from tandem.v1 import worker_pb2 as pb
from tandem.wire import request_to_wire
from tests.simulation.engine import DigestEngine
from transfer.fake_agent import FakeFabric

SHORT = Request("r", (1, 2, 3), SamplingParams(), StopRules(4))


class Worker:
    """Its threads do not run, so nothing that was placed is computed."""

    def __init__(self, event_loop: asyncio.AbstractEventLoop) -> None:
        engine = DigestEngine(num_blocks=24, num_slots=3)
        config = WorkerConfig(decode=DecodeConfig(local_prefill_tokens=4))
        agent = FakeFabric(FakeClock(), 0).agent("d")
        self.inside = DecodeWorker("d", config, engine, agent)  # type: ignore[arg-type]
        self.inside.description = describe("d", "decode", "", "fake", engine)  # type: ignore[arg-type]
        self._event_loop = event_loop
        self._outbox = self.inside._hub.open("router", event_loop)

    def place(self, request: Request, attempt: int = 1) -> None:
        self.inside._command("router", pb.DecodeCommand(prefill=request_to_wire(request, attempt, "another")))

    def refused(self) -> list[tuple[str, bool]]:
        events = self._event_loop.run_until_complete(self._outbox.take(0.0))
        return [(failed.kind, failed.retryable) for failed in events.failed]

    @property
    def leases(self) -> list[tuple[str, str]]:
        return [(lease.router_id, lease.state.value) for lease in self.inside._leases.all_live()]


@pytest.fixture
def worker() -> Iterator[Worker]:
    event_loop = asyncio.new_event_loop()
    yield Worker(event_loop)
    event_loop.close()


def test_a_short_prompt_has_its_memory_at_once_and_belongs_to_the_session_it_came_by(worker: Worker) -> None:
    worker.place(SHORT)
    assert worker.leases == [("router", "computing")]
    assert worker.refused() == []


def test_a_prompt_that_comes_twice_is_one(worker: Worker) -> None:
    worker.place(SHORT)
    worker.place(SHORT)
    assert len(worker.leases) == len(worker.inside._loop.inbox.take(0.0)) == 1


@pytest.mark.parametrize(
    ("request_", "kind", "retryable"),
    [
        (replace(SHORT, prompt=(1, 2, 3, 4, 5)), "HandoffError", True),
        (replace(SHORT, generated=(5, 6)), "HandoffError", True),
        (replace(SHORT, stop=StopRules(95)), "InvalidRequest", False),
        (replace(SHORT, prompt=(1, 999)), "InvalidRequest", False),
    ],
    ids=["too-long", "too-long-with-its-answer", "beyond-the-context", "no-token"],
)
def test_what_cannot_be_computed_here_is_refused_and_holds_nothing(
    worker: Worker, request_: Request, kind: str, retryable: bool
) -> None:
    worker.place(request_)
    assert worker.refused() == [(kind, retryable)]
    assert worker.leases == []


def test_a_full_worker_refuses_as_it_refuses_a_reservation(worker: Worker) -> None:
    for attempt in range(1, 5):
        worker.place(SHORT, attempt)
    assert len(worker.leases) == 3
    assert worker.refused() == [("NoRoom", True)]


def test_a_worker_that_leaves_takes_no_prompt(worker: Worker) -> None:
    worker.inside._leaving = True
    worker.place(SHORT)
    assert worker.refused() == [("Leaving", True)]
    assert worker.leases == []
