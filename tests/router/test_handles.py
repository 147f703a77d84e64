"""Sessions with workers over real gRPC: hello first, events to whom they concern, a lost worker fails what it had."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc.aio
import pytest

from router.events import AttemptEvent, Failed, FirstToken, PrefillStarted, Ready, Standing, Tokens
from router.handles import GrpcWorkerHandle
from router.worker import DECODE, PREFILL, WorkerInfo, WorkerLoad
from tandem.request import FinishReason, Request, SamplingParams, StopRules
from tandem.rpc import bind, create_internal_server
from tandem.v1 import worker_pb2 as pb
from tandem.v1 import worker_pb2_grpc as pb_grpc
from tests.router.tools import MODEL, TRUST, until
from tests.standstill import stand_still

REQUEST = Request("r", (1, 2), SamplingParams(seed=7), StopRules(5, frozenset({0})), generated=(3,))


class ScriptedWorker(pb_grpc.PrefillWorkerServicer, pb_grpc.DecodeWorkerServicer):
    """commands: all that came, over all sessions. What is put into `outbox` is sent; None ends the session."""

    def __init__(self) -> None:
        self.commands: list[pb.PrefillCommand | pb.DecodeCommand] = []
        self.outbox: asyncio.Queue[pb.PrefillEvents | pb.DecodeEvents | None] = asyncio.Queue()

    async def Session(
        self, request_iterator: AsyncIterator[pb.PrefillCommand], context: object
    ) -> AsyncIterator[pb.PrefillEvents]:
        reading = asyncio.create_task(self._read(request_iterator))
        try:
            while (events := await self.outbox.get()) is not None:
                yield events
        finally:
            reading.cancel()

    async def _read(self, commands: AsyncIterator[pb.PrefillCommand]) -> None:
        async for command in commands:
            self.commands.append(command)


class Session:
    def __init__(self, worker: ScriptedWorker, handle: GrpcWorkerHandle, server: grpc.aio.Server) -> None:
        self.worker = worker
        self.handle = handle
        self.server = server
        self.events: list[AttemptEvent] = []

    async def say(self, events: pb.PrefillEvents | pb.DecodeEvents, heard: Callable[[], object]) -> None:
        self.worker.outbox.put_nowait(events)
        await until(heard)


@asynccontextmanager
async def session(role: str, silence_s: float = 3.0) -> AsyncIterator[Session]:
    server = create_internal_server(TRUST)
    worker = ScriptedWorker()
    add = pb_grpc.add_PrefillWorkerServicer_to_server if role == PREFILL else pb_grpc.add_DecodeWorkerServicer_to_server
    add(worker, server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    info = WorkerInfo("w", role, f"127.0.0.1:{port}", MODEL)
    changes: list[None] = []
    handle = GrpcWorkerHandle(info, "router-1", TRUST, lambda: changes.append(None), silence_s)
    it = Session(worker, handle, server)
    empty = pb.PrefillEvents if role == PREFILL else pb.DecodeEvents
    try:
        await it.say(empty(load=pb.WorkerLoad(running=2, kv_blocks_total=9)), lambda: handle.load)
        assert changes
        yield it
    finally:
        await handle.close()
        await server.stop(None)


async def test_the_router_introduces_itself_and_tasks_and_cancels_follow_in_order() -> None:
    async with session(PREFILL) as it:
        it.handle.submit(REQUEST, 2, "d7")
        it.handle.cancel(("r", 2))
        await until(lambda: len(it.worker.commands) == 3)
        hello, task, cancel = it.worker.commands
        assert hello.hello == "router-1"
        wire = task.task.request
        assert (task.task.decode_worker_id, wire.request_id, wire.attempt, wire.router_id) == ("d7", "r", 2, "router-1")
        assert (list(wire.prompt), list(wire.generated), wire.sampling.seed) == ([1, 2], [3], 7)
        assert (cancel.cancel.request_id, cancel.cancel.attempt) == ("r", 2)


async def test_prefill_events_reach_the_attempt_they_name_only() -> None:
    async with session(PREFILL) as it:
        it.handle.subscribe(("r", 2), it.events.append)
        first = pb.FirstToken(request_id="r", attempt=2, index=1, token=9, finish_reason="length", prefill_seconds=0.5)
        old = pb.FirstToken(request_id="r", attempt=1, index=1, token=8)
        started = pb.PrefillStarted(request_id="r", attempt=2)
        await it.say(pb.PrefillEvents(first_tokens=[old, first], started=[started]), lambda: len(it.events) == 2)
        assert it.events == [PrefillStarted(), FirstToken(1, 9, FinishReason.LENGTH, 0.5)]


async def test_a_worker_is_asked_for_a_task_and_its_answer_comes_after_what_the_task_did() -> None:
    async with session(PREFILL) as it:
        it.handle.subscribe(("r", 2), it.events.append)
        it.handle.ask(("r", 2))
        await until(lambda: len(it.worker.commands) == 2)
        ask = it.worker.commands[1].ask
        assert (ask.request_id, ask.attempt) == ("r", 2)
        standing = pb.TaskStanding(request_id="r", attempt=2, known=False)
        first = pb.FirstToken(request_id="r", attempt=2, index=1, token=9)
        await it.say(pb.PrefillEvents(first_tokens=[first], standings=[standing]), lambda: len(it.events) == 2)
        assert it.events == [FirstToken(1, 9), Standing(known=False)]


async def test_decode_events_and_failures_arrive_with_the_load() -> None:
    async with session(DECODE) as it:
        it.handle.subscribe(("r", 1), it.events.append)
        events = pb.DecodeEvents(
            ready=[pb.SequenceReady(request_id="r", attempt=1, handoff_exposed_seconds=0.1)],
            tokens=[pb.SequenceTokens(request_id="r", attempt=1, index=1, tokens=[4, 5])],
            failed=[pb.AttemptFailed(request_id="r", attempt=1, kind="LeaseLost", reason="expired", retryable=True)],
            load=pb.WorkerLoad(queue=1, state_slots_used=3, leases={"running": 3}),
        )
        await it.say(events, lambda: len(it.events) == 3)
        assert it.events == [Ready(0.1), Tokens(1, (4, 5)), Failed("w", "LeaseLost", "expired", True)]
        assert it.handle.load == WorkerLoad(queue=1, state_slots_used=3, leases={"running": 3})


async def test_a_prompt_for_the_decode_worker_itself_goes_over_its_session_and_so_do_its_events() -> None:
    async with session(DECODE) as it:
        key = ("r", 3)
        it.handle.subscribe(key, it.events.append)
        it.handle.submit(REQUEST, 3, "d0")
        it.handle.ask(key)
        await until(lambda: len(it.worker.commands) == 3)
        _, placed, asked = it.worker.commands
        assert isinstance(placed, pb.DecodeCommand)
        assert (placed.prefill.request_id, placed.prefill.attempt, list(placed.prefill.prompt)) == ("r", 3, [1, 2])
        assert (asked.ask.request_id, asked.ask.attempt) == key
        events = pb.DecodeEvents(
            standings=[pb.TaskStanding(request_id="r", attempt=3)],
            tokens=[pb.SequenceTokens(request_id="r", attempt=3, index=2, tokens=[8])],
            ready=[pb.SequenceReady(request_id="r", attempt=3)],
            first_tokens=[pb.FirstToken(request_id="r", attempt=3, index=1, token=7)],
            started=[pb.PrefillStarted(request_id="r", attempt=3)],
            load=pb.WorkerLoad(token_seconds=0.5, reserve_seconds=0.25, local_prefill_tokens=8, local_prefill_share=0.125),
        )
        await it.say(events, lambda: len(it.events) == 5)
        assert it.events == [PrefillStarted(), FirstToken(1, 7), Ready(0.0), Tokens(2, (8,)), Standing(False)]
        load = it.handle.load
        assert load is not None
        told = (load.token_s, load.reserve_s, load.local_prefill_tokens, load.local_prefill_share)
        assert told == (0.5, 0.25, 8, 0.125)


async def test_no_event_comes_after_unsubscribing() -> None:
    async with session(DECODE) as it:
        it.handle.subscribe(("r", 1), it.events.append)
        it.handle.unsubscribe(("r", 1))
        tokens = pb.SequenceTokens(request_id="r", attempt=1, tokens=[4])
        await it.say(pb.DecodeEvents(tokens=[tokens], load=pb.WorkerLoad(queue=5)), lambda: it.handle.load.queue == 5)
        assert it.events == []


async def test_a_session_that_ends_fails_its_attempts_and_a_new_one_is_made() -> None:
    async with session(PREFILL) as it:
        it.handle.subscribe(("r", 1), it.events.append)
        it.worker.outbox.put_nowait(None)
        await until(lambda: it.events)
        (failed,) = it.events
        assert isinstance(failed, Failed)
        assert (failed.worker_id, failed.kind, failed.retryable) == ("w", "WorkerLost", True)
        assert it.handle.load is None
        it.handle.subscribe(("r", 2), it.events.append)
        assert len(it.events) == 2
        await it.say(pb.PrefillEvents(load=pb.WorkerLoad(queue=4)), lambda: it.handle.load)
        it.handle.subscribe(("r", 3), it.events.append)
        assert len(it.events) == 2
        assert [command.hello for command in it.worker.commands] == ["router-1"] * 2


async def test_a_silent_worker_is_lost() -> None:
    async with session(PREFILL, silence_s=0.05) as it:
        it.handle.subscribe(("r", 1), it.events.append)
        await until(lambda: it.events)
        assert it.events[0].reason == "silent for 0.05 s"


async def test_a_worker_is_not_lost_because_the_router_did_not_run() -> None:
    async with session(PREFILL, silence_s=0.2) as it:
        it.handle.subscribe(("r", 1), it.events.append)
        stand_still(0.6)
        await it.say(pb.PrefillEvents(load=pb.WorkerLoad(queue=4)), lambda: it.handle.load and it.handle.load.queue == 4)
        assert it.events == []


async def test_a_dead_worker_is_lost() -> None:
    async with session(DECODE) as it:
        it.handle.subscribe(("r", 1), it.events.append)
        await it.server.stop(None)
        await until(lambda: it.events)
        assert it.events[0].kind == "WorkerLost"


async def test_closing_fails_what_is_left() -> None:
    async with session(DECODE) as it:
        it.handle.subscribe(("r", 1), it.events.append)
        await it.handle.close()
        assert isinstance(it.events[0], Failed)


async def test_a_worker_that_is_not_there_yet_is_not_ready_and_fails_attempts_at_once() -> None:
    handle = GrpcWorkerHandle(
        WorkerInfo("w", PREFILL, "127.0.0.1:1", MODEL), "router-1", TRUST, lambda: pytest.fail("nothing changes")
    )
    events: list[AttemptEvent] = []
    handle.subscribe(("r", 1), events.append)
    await until(lambda: events)
    assert handle.load is None
    assert isinstance(events[0], Failed)
    await handle.close()


@pytest.mark.parametrize(("leaving", "said"), [(False, "is lost"), (True, "has left")])
async def test_only_a_worker_that_had_not_said_it_would_leave_is_told_as_lost(
    leaving: bool, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "router.handles")
    async with session(PREFILL) as it:
        await it.say(
            pb.PrefillEvents(load=pb.WorkerLoad(leaving=leaving)), lambda: it.handle.load and it.handle.load.leaving == leaving
        )
        it.worker.outbox.put_nowait(None)
        await until(lambda: it.handle.load is None)
    ends = [record.getMessage() for record in caplog.records if "the worker ended the session" in record.getMessage()]
    assert ends == [f"worker w {said}: the worker ended the session"]
