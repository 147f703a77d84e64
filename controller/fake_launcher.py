"""Workers without processes, scripted by a test: they start, refuse, die and freeze on command."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from controller.launcher import Node, ProcessRecord, WorkerDied
from tandem.v1 import worker_pb2

__all__ = ["FakeLauncher", "FakeWorker"]


@dataclass(eq=False)
class FakeWorker:
    """calls: what it was told, in order, as "connect prefill-…", "disconnect …", "stop", "kill". frozen: it answers nothing.
    unkillable: its node does not answer, so that its end cannot be made certain. drained: clear it, and `stop` waits for it."""

    role: str
    worker_id: str
    calls: list[str] = field(default_factory=list)
    refuses: dict[str, str] = field(default_factory=dict)
    started: asyncio.Event = field(default_factory=asyncio.Event)
    frozen: bool = False
    unkillable: bool = False
    loaded: tuple[int, int] = (0, 100)
    reported: worker_pb2.WorkerLoad = field(default_factory=worker_pb2.WorkerLoad)
    drained: asyncio.Event = field(default_factory=asyncio.Event)
    node_id: str = "here"
    _start_error: Exception | None = None
    _ended: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    # ---- the test's side ----

    def let_start(self) -> None:
        self.loaded = (100, 100)
        self.started.set()

    def fail_start(self, error: Exception) -> None:
        self._start_error = error
        self.started.set()

    def die(self, reason: str = "killed by the test") -> None:
        if not self._ended.done():
            self._ended.set_exception(WorkerDied(reason))
            self._ended.exception()  # read once, so that a death nobody waits for is no warning

    def end_by_itself(self, reason: str) -> None:
        self._ended.set_result(reason)

    @property
    def is_alive(self) -> bool:
        return not self._ended.done()

    @property
    def peers(self) -> list[str]:
        """Ids this worker is connected to."""
        connected = {call.split()[1] for call in self.calls if call.startswith("connect ")}
        return sorted(connected - {call.split()[1] for call in self.calls if call.startswith("disconnect ")})

    # ---- the controller's side: WorkerHandle ----

    @property
    def process_record(self) -> ProcessRecord | None:
        return (self.node_id, int(self.worker_id.rpartition("-")[2]), 0) if self.started.is_set() else None

    async def start(self) -> bytes:
        await self._or_death(self.started.wait())
        if self._start_error is not None:
            raise self._start_error
        return worker_pb2.WorkerDescription(worker_id=self.worker_id, role=self.role).SerializeToString()

    async def progress(self) -> tuple[int, int]:
        if self.frozen:
            await asyncio.Event().wait()
        self._raise_if_dead()
        return self.loaded

    async def load(self) -> bytes:
        if self.frozen:
            await asyncio.Event().wait()
        self._raise_if_dead()
        return self.reported.SerializeToString()

    async def connect(self, peers: list[bytes]) -> list[tuple[str, str]]:
        if self.frozen:
            await asyncio.Event().wait()
        self._raise_if_dead()
        ids = [worker_pb2.WorkerDescription.FromString(peer).worker_id for peer in peers]
        self.calls += [f"connect {peer}" for peer in ids if peer not in self.refuses]
        return [(peer, self.refuses[peer]) for peer in ids if peer in self.refuses]

    async def disconnect(self, worker_id: str) -> None:
        self._raise_if_dead()
        self.calls.append(f"disconnect {worker_id}")

    async def wait_stopped(self) -> str:
        return await asyncio.shield(self._ended)

    async def stop(self, drain_s: float | None = None) -> None:
        if self.frozen:
            await asyncio.Event().wait()
        self._raise_if_dead()
        self.calls.append("stop" if drain_s is None else f"stop {drain_s:g}")
        await self.drained.wait()

    async def kill(self) -> None:
        self.calls.append("kill")
        if self.unkillable:
            await asyncio.Event().wait()
        self.die("killed")

    def _raise_if_dead(self) -> None:
        if self._ended.done():
            self._ended.result()

    async def _or_death(self, waiting: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(waiting)
        try:
            await asyncio.wait({task, self._ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            task.cancel()
        self._raise_if_dead()


@dataclass(eq=False)
class FakeLauncher:
    """units: what the node "here" offers; a test may change it. others: more nodes. auto_start: workers start without being
    let. A worker is on the first node that it need not avoid and that has a unit of its role left."""

    units: dict[str, int]
    auto_start: bool = True
    workers: list[FakeWorker] = field(default_factory=list)
    others: list[Node] = field(default_factory=list)

    async def nodes(self) -> Sequence[Node]:
        return [Node("here", "10.0.0.1", "host-1", dict(self.units)), *self.others]

    async def launch(self, role: str, worker_id: str, config_json: str, avoid: Collection[str] = ()) -> FakeWorker:
        allowed = [node for node in await self.nodes() if node.id not in avoid]
        free = [node.id for node in allowed if node.units.get(role, 0) > self._used(node.id, role)]
        worker = FakeWorker(role, worker_id, node_id=next(iter(free), "nowhere"))
        worker.drained.set()
        if self.auto_start:
            worker.let_start()
        self.workers.append(worker)
        return worker

    async def find(self, worker_id: str, process: ProcessRecord | None) -> FakeWorker:
        return next(worker for worker in self.workers if worker.worker_id == worker_id)

    def _used(self, node_id: str, role: str) -> int:
        return sum(worker.node_id == node_id and worker.is_alive for worker in self.of(role))

    def of(self, role: str) -> list[FakeWorker]:
        """All workers of a role that were ever launched, in order."""
        return [worker for worker in self.workers if worker.role == role]
