"""Membership becomes handles; workers of another model are refused; a controller that is away changes nothing."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from router.fake_workers import FakeWorkerHandle
from router.fleet import Fleet, Member, Membership, PoolWish
from router.membership import follow
from router.model import ModelInfo
from router.state import WorkerTable
from router.status import status_of
from router.worker import DECODE, PREFILL, WorkerInfo
from tandem.errors import CheckpointError
from tandem.rpc import bind, create_internal_server
from tandem.v1 import worker_pb2 as pb
from tandem.v1 import worker_pb2_grpc as pb_grpc
from tests.router.tools import MODEL, TRUST, ByteTokenizer, until


class Fixture:
    def __init__(self) -> None:
        self.table = WorkerTable()
        self.connected: list[FakeWorkerHandle] = []
        self.loaded: list[str] = []
        self.fleet = Fleet(self.table, self._connect, self._load)

    def ids(self) -> set[str]:
        return {entry.handle.info.id for entry in self.table.entries}

    def _connect(self, info: WorkerInfo) -> FakeWorkerHandle:
        self.connected.append(FakeWorkerHandle(info))
        return self.connected[-1]

    def _load(self, path: str) -> ByteTokenizer:
        self.loaded.append(path)
        if path == "broken":
            raise CheckpointError("broken")
        return ByteTokenizer()


def member(worker_id: str, role: str = PREFILL, draining: bool = False, model: ModelInfo = MODEL) -> Member:
    return Member(WorkerInfo(worker_id, role, "127.0.0.1:1", model), draining)


def other(**fields: object) -> ModelInfo:
    values = {"name": "x", "fingerprint": "f1", "max_context_tokens": 512, "block_size_tokens": 16, "vocab_size": 256}
    return ModelInfo(**{**values, **fields})  # type: ignore[arg-type]


async def test_workers_come_and_go_with_the_membership() -> None:
    it = Fixture()
    await it.fleet.apply(Membership((member("p0"), member("d0", DECODE)), {"prefill": PoolWish(1)}))
    assert it.ids() == {"p0", "d0"}
    assert it.table.can_serve
    await it.fleet.apply(Membership((member("p0", draining=True), member("p1"), member("d0", DECODE))))
    assert [(e.handle.info.id, e.state) for e in it.table.entries] == [("p0", "draining"), ("d0", "ready"), ("p1", "ready")]
    await it.fleet.apply(Membership((member("p1"),)))
    assert it.ids() == {"p1"}
    assert len(it.connected) == 3
    assert len(it.loaded) == 1


async def test_a_worker_that_left_fails_its_attempts() -> None:
    it = Fixture()
    await it.fleet.apply(Membership((member("p0"),)))
    events: list[object] = []
    it.connected[0].subscribe(("r", 1), events.append)
    await it.fleet.apply(Membership())
    assert len(events) == 1


@pytest.mark.parametrize(
    "model", [other(fingerprint="f2"), other(max_context_tokens=4), other(block_size_tokens=32), other(vocab_size=9)]
)
async def test_a_worker_of_another_model_is_refused_and_shown(model: ModelInfo, caplog: pytest.LogCaptureFixture) -> None:
    it = Fixture()
    membership = Membership((member("p0"), member("d0", DECODE, model=model)))
    await it.fleet.apply(membership)
    await it.fleet.apply(membership)
    assert it.ids() == {"p0"}
    assert not it.table.can_serve
    assert [w.state for w in status_of(it.fleet, it.table, {}).workers] == ["ready", "refused"]
    assert sum("d0 is not used" in record.message for record in caplog.records) == 1
    await it.fleet.apply(Membership((member("p0"), member("d0", DECODE))))
    assert it.table.can_serve


async def test_a_tokenizer_that_cannot_be_loaded_keeps_the_router_out_of_service() -> None:
    it = Fixture()
    with pytest.raises(CheckpointError):
        await it.fleet.apply(Membership((member("p0", model=other(tokenizer_path="broken")),)))
    assert it.fleet.model is None
    await it.fleet.apply(Membership((member("p1"),)))
    assert it.ids() == {"p1"}


class Controller(pb_grpc.MembershipServicer):
    def __init__(self) -> None:
        self.watchers: list[str] = []
        self.snapshots: asyncio.Queue[pb.MembershipSnapshot | None] = asyncio.Queue()

    async def Watch(self, request: pb.WatchRequest, context: object) -> AsyncIterator[pb.MembershipSnapshot]:
        self.watchers.append(request.router_id)
        while (snapshot := await self.snapshots.get()) is not None:
            yield snapshot


def snapshot(*worker_ids: str, state: str = "ready") -> pb.MembershipSnapshot:
    identity = pb.ModelIdentity(
        name="bytes", fingerprint="f1", max_context_tokens=512, block_size_tokens=16, vocab_size=256, tokenizer_path="folder"
    )
    workers = [
        pb.WorkerDescription(worker_id=i, role="prefill", address="127.0.0.1:1", pid=4, model=identity) for i in worker_ids
    ]
    return pb.MembershipSnapshot(
        members=[pb.Member(worker=worker, state=state) for worker in workers],
        pools={"prefill": pb.PoolWish(wanted=3, reason="why")},
    )


async def test_the_last_membership_outlives_the_stream_and_the_next_stream_is_followed() -> None:
    it = Fixture()
    controller = Controller()
    server = create_internal_server(TRUST)
    pb_grpc.add_MembershipServicer_to_server(controller, server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    following = asyncio.create_task(follow(f"127.0.0.1:{port}", "router-1", TRUST, it.fleet))
    controller.snapshots.put_nowait(snapshot("p0"))
    await until(lambda: it.ids() == {"p0"})
    assert it.loaded == ["folder"]
    assert it.fleet.pools["prefill"] == PoolWish(3, "why")
    controller.snapshots.put_nowait(None)
    await until(lambda: len(controller.watchers) == 2)
    assert it.ids() == {"p0"}
    controller.snapshots.put_nowait(snapshot("p0", "p1", state="draining"))
    await until(lambda: it.ids() == {"p0", "p1"})
    assert {entry.state for entry in it.table.entries} == {"draining"}
    following.cancel()
    await asyncio.wait([following])
    await server.stop(None)
