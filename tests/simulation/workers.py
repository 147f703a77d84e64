"""Workers as simulated processes: what the controller starts, pairs, pings and kills."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from controller.launcher import Node, WorkerDied
from decode_worker.service import DecodeService
from decode_worker.worker import DecodeWorker
from prefill_worker.service import PrefillService
from prefill_worker.worker import PrefillWorker
from tandem.config import WorkerConfig
from tandem.secret import Secret
from tandem.trust import Trust
from tandem.v1 import worker_pb2 as pb
from tests.simulation.engine import DigestEngine
from tests.simulation.network import Network
from tests.simulation.threads import LooperThread, StepThread
from tests.simulation.watch import Watch
from tests.simulation.world import Condition, Process, World
from transfer.fake_agent import FakeFabric

__all__ = ["TRUST", "Launcher", "Site", "WorkerProcess"]

TRUST = Trust(Secret("a secret of the simulation"))
_NOTICED_S = (0.05, 1.0)
_CALL_S = (0.001, 0.01)
_SLOW_CALL_S = 0.5
_STEP_S = {"prefill": (0.01, 0.06), "decode": (0.005, 0.04)}
_SNEAK_IN = 0.2


@dataclass
class Site:
    """What all workers share."""

    world: World
    network: Network
    fabric: FakeFabric
    watch: Watch
    config: WorkerConfig
    pools: Mapping[str, tuple[int, ...]]
    workers: dict[str, WorkerProcess] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.fabric.on_due = self._on_due

    def _on_due(self, name: str, when: float) -> None:
        if (worker := self.workers.get(name)) is not None and worker.looper is not None:
            worker.looper.wake_at(when)

    def alive(self, role: str = "") -> list[WorkerProcess]:
        """Processes that exist, stopped ones too, in order of their start."""
        return [w for w in self.workers.values() if w.is_up and role in ("", w.role)]


class WorkerProcess:
    """The process, and the controller's handle of it (`controller.launcher.WorkerHandle`)."""

    def __init__(self, site: Site, role: str, worker_id: str) -> None:
        self.site = site
        self.role = role
        self.worker_id = worker_id
        self.process: Process = site.world.process(worker_id)
        self.process.on_death.append(self._died)
        self.chance = site.world.random(f"worker {len(site.workers)}")
        self.engine = DigestEngine(*site.pools[role])
        self.worker: Any = None
        self.looper: LooperThread | None = None
        self._controller: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self._waiting: dict[asyncio.Future[Any], None] = {}
        self._ended = asyncio.Event()
        self._last_call_s = 0.0

    @property
    def is_up(self) -> bool:
        return self.worker is not None and self.process.condition is not Condition.DEAD

    # ---- WorkerHandle ----

    @property
    def process_record(self) -> None:
        return None

    async def start(self) -> bytes:
        return await self._ask(self._start)

    async def progress(self) -> tuple[int, int]:
        async def answer() -> tuple[int, int]:
            return (1, 1)

        # Asked so often that it is not played through for a process that would answer at once.
        return await (answer() if self.process.condition is Condition.RUNNING else self._ask(answer))

    async def load(self) -> bytes:
        raise WorkerDied("the simulation scales nothing")

    async def connect(self, peers: list[bytes]) -> list[tuple[str, str]]:
        return await self._ask(lambda: self.worker.connect([pb.WorkerDescription.FromString(peer) for peer in peers]))

    async def disconnect(self, worker_id: str) -> None:
        async def told() -> None:
            if self.role == "prefill":
                await self.worker.disconnect(worker_id)
            else:
                self.worker.writer_dead(worker_id)

        await self._ask(told)

    async def wait_stopped(self) -> str:
        return str(await self._ask(self._ended.wait))

    async def stop(self, drain_s: float | None = None) -> None:
        raise WorkerDied("the simulation stops no worker in order")

    async def kill(self) -> None:
        self.process.kill()
        await asyncio.sleep(self.chance.uniform(*_NOTICED_S) / 4)

    async def _ask(self, make: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """A call from the controller's process into this one."""
        if self.process.condition is Condition.DEAD:
            raise WorkerDied("killed")
        answer: asyncio.Future[Any] = self._controller.create_future()
        self._waiting[answer] = None

        def begin() -> None:
            self.process.create_task(make()).add_done_callback(ended)

        def ended(task: asyncio.Task[Any]) -> None:
            if not task.cancelled():
                self._controller.call_later(self._call_s(), pass_on, task)

        def pass_on(task: asyncio.Task[Any]) -> None:
            error = task.exception()
            if answer.done():
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(task.result())

        # Ray hands the calls of one caller over in order.
        self._last_call_s = max(self._last_call_s, self.site.world.now + self._call_s())
        self.process.call_at(self._last_call_s, begin)
        try:
            return await answer
        finally:
            del self._waiting[answer]

    def _call_s(self) -> float:
        """What a call through Ray takes, one way."""
        return self.chance.uniform(*_CALL_S) if self.chance.random() < 0.9 else self.chance.uniform(0.0, _SLOW_CALL_S)

    # ---- its life ----

    async def _start(self) -> bytes:
        site = self.site
        agent = site.fabric.agent(self.worker_id)
        if self.role == "prefill":
            worker = PrefillWorker(self.worker_id, site.config, self.engine, agent, TRUST)  # type: ignore[arg-type]
            site.watch.prefill(worker, agent)
            self._become(worker, worker._sender, worker._sender._pace, lambda: bool(worker._loop._prompts.running))
            service: Any = PrefillService(worker)
            descriptor = pb.DESCRIPTOR.services_by_name["PrefillWorker"]
        else:
            reader = DecodeWorker(self.worker_id, site.config, self.engine, agent)  # type: ignore[arg-type]
            site.watch.decode(reader)
            steps = reader._loop
            busy = lambda: bool(  # noqa: E731
                steps._running or steps._verified or steps._residency.num_away or steps.local.waiting
            )
            self._become(reader, reader._receiver, reader._receiver.step, busy)
            service = DecodeService(reader)
            descriptor = pb.DESCRIPTOR.services_by_name["DecodeWorker"]
        site.network.serve(self.worker_id, self.process, service, descriptor)
        self.worker.start(self.worker_id)
        description: bytes = self.worker.description.SerializeToString()
        return description

    def _become(self, worker: Any, mover: Any, step: Callable[[], float], is_busy: Callable[[], bool]) -> None:
        """Give the worker's threads to virtual time. Between two layers of a step, the transfer thread may get its turn."""
        self.worker = worker
        soon_s = self.site.config.transfer.poll_interval_s
        self.looper = mover._looper = LooperThread(self.process, self.chance, "transfer", step, soon_s)
        worker._thread = StepThread(self.process, self.chance, worker._loop, _STEP_S[self.role], is_busy)

        def sneak_in() -> None:
            if self.chance.random() < _SNEAK_IN:
                step()

        self.engine.between = sneak_in

    def terminate(self) -> None:
        """As SIGTERM does."""

        async def end() -> None:
            await self.worker.drain()
            stopping = self.worker.stop()
            if stopping is not None:
                await stopping
            self._ended.set()
            self.process.call_later(_CALL_S[0], self.process.kill)

        self.process.spawn(end())

    def stall(self, thread: str, for_s: float) -> None:
        """thread: "steps" or "transfer"."""
        stalled = self.worker._thread if thread == "steps" else self.looper
        stalled.stall(for_s)

    def _died(self) -> None:
        self.site.fabric.kill(self.worker_id)
        for answer in list(self._waiting):
            self._controller.call_later(self.chance.uniform(*_NOTICED_S), _fail, answer)  # type: ignore[arg-type]


def _fail(answer: asyncio.Future[Any]) -> None:
    if not answer.done():
        answer.set_exception(WorkerDied("killed"))


class Launcher:
    """`controller.launcher.WorkerLauncher`. units: by role."""

    def __init__(self, site: Site, units: Mapping[str, int]) -> None:
        self._site = site
        self._units = dict(units)

    async def nodes(self) -> Sequence[Node]:
        return [Node("node", "node", "node", self._units)]

    async def launch(self, role: str, worker_id: str, config_json: str, avoid: Collection[str] = ()) -> WorkerProcess:
        worker = WorkerProcess(self._site, role, worker_id)
        self._site.workers[worker_id] = worker
        return worker
