"""A whole cluster on virtual time: the real controller, router and workers, without their threads, gRPC, NIXL and Ray."""

from __future__ import annotations

import dataclasses
import itertools

from controller.controller import Controller
from controller.life import Timing
from controller.membership import _Membership
from router.fleet import Fleet
from router.handles import GrpcWorkerHandle
from router.membership import follow
from router.pipeline import Pipeline
from router.state import WorkerTable
from router.worker import WorkerInfo
from tandem.config import DecodeConfig, PrefillConfig, RouterConfig, TransferConfig, WorkerConfig
from tandem.detokenizer import BytePieces, IncrementalDetokenizer
from tandem.v1 import worker_pb2
from tests.simulation.engine import VOCAB
from tests.simulation.network import Network
from tests.simulation.scenario import (
    WRITE_TIMEOUT_S,
    Act,
    Cut,
    FailStep,
    Freeze,
    Kill,
    Reset,
    RestartRouter,
    Scenario,
    Stall,
    Terminate,
    text_of,
)
from tests.simulation.watch import Watch
from tests.simulation.workers import TRUST, Launcher, Site, WorkerProcess
from tests.simulation.world import Process, World
from transfer.fake_agent import FakeFabric

__all__ = ["Cluster", "Front"]

_TIMING = Timing(look_s=1.0, ping_s=1.5, answer_s=4.0, connect_s=6.0, stop_s=2.0, kill_s=2.0)
_ROUTER = RouterConfig(queue_wait_s=12.0, stall_s=10.0, ask_after_s=3.0)
_CONTROLLER = "controller"
_ALPHABET = BytePieces([text_of(token).encode() for token in range(VOCAB)])


class _Tokenizer:
    eos_ids = frozenset[int]()

    def detokenizer(self) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(_ALPHABET)


class Front:
    """A router without its gRPC server. Clients live in its process."""

    def __init__(self, cluster: Cluster, number: int, config: RouterConfig) -> None:
        self.router_id = f"router-{number}"
        self.process: Process = cluster.world.process(self.router_id)
        self.table = WorkerTable()
        self.fleet = Fleet(self.table, self._connect, lambda folder: _Tokenizer())  # type: ignore[arg-type, return-value]
        self.pipeline = Pipeline(config, self.table, lambda: self.fleet.model, cluster.world.clock)
        self.process.spawn(follow(_CONTROLLER, self.router_id, TRUST, self.fleet))

    def _connect(self, info: WorkerInfo) -> GrpcWorkerHandle:
        return GrpcWorkerHandle(info, self.router_id, TRUST, lambda: self.table.changed(info.id))


class Cluster:
    """Made within `seams.patched`. fronts: the routers that new clients find."""

    def __init__(self, scenario: Scenario, world: World, network: Network) -> None:
        self.world = world
        self.network = network
        self.fabric = FakeFabric(world.clock, scenario.seed)
        config = WorkerConfig(
            drain_s=2.0,
            prefill=PrefillConfig(
                chunk_tokens=scenario.chunk_tokens,
                max_queue=scenario.max_queue,
                reserve_patience_s=1.5,
                checkpoint_every_tokens=scenario.checkpoint_every,
            ),
            decode=DecodeConfig(
                max_batch=scenario.max_batch,
                lease_ttl_s=6.0,
                overcommit=scenario.overcommit,
                swap_gib=scenario.swap_gib,
                local_prefill_tokens=scenario.local_prefill_tokens,
            ),
            transfer=TransferConfig(poll_interval_s=0.01, timeout_s=WRITE_TIMEOUT_S, overlap=scenario.overlap),
        )
        pools = {role: (scenario.blocks[role], scenario.slots[role]) for role in ("prefill", "decode")}
        pools["prefill"] = (*pools["prefill"], scenario.checkpoints)
        self.site = Site(world, self.network, self.fabric, Watch(world, self.fabric), config, pools)
        self._units = {"prefill": scenario.num_prefill, "decode": scenario.num_decode}
        self._router_numbers = itertools.count(1)
        self._controlling = world.process(_CONTROLLER)
        self.controller = Controller(
            Launcher(self.site, self._units), {"prefill": None, "decode": None}, "", timing=_TIMING, clock=world.clock
        )
        membership = worker_pb2.DESCRIPTOR.services_by_name["Membership"]
        self.network.serve(_CONTROLLER, self._controlling, _Membership(self.controller), membership)
        self._controlling.spawn(self.controller.run())
        self._config = dataclasses.replace(_ROUTER, max_queue=scenario.max_queue)
        self.fronts = [self._new_front() for _ in range(scenario.num_routers)]

    def is_ready(self) -> bool:
        wanted = self._units.items()
        return all(front.table.num_ready(role) == count for front in self.fronts for role, count in wanted)

    def front(self, index: int) -> Front:
        return self.fronts[index % len(self.fronts)]

    def _new_front(self) -> Front:
        return Front(self, next(self._router_numbers), self._config)

    # ---- what happens to it ----

    def apply(self, act: Act) -> None:
        match act:
            case Kill(role=role, index=index):
                if (worker := self._worker(role, index)) is not None:
                    worker.process.kill()
            case Terminate(role=role, index=index):
                if (worker := self._worker(role, index)) is not None:
                    worker.terminate()
            case Freeze(role=role, index=index):
                if (process := self._process((role, index))) is not None:
                    self._freeze(process, act.for_s)
            case Stall(role=role, index=index):
                if (worker := self._worker(role, index)) is not None:
                    worker.stall(act.thread, act.for_s)
            case Cut():
                self._cut(self._process(act.one), self._process(act.other), act.for_s)
            case Reset():
                link = frozenset(process.name for process in (self._process(act.one), self._process(act.other)) if process)
                self.network.reset(lambda rpc: rpc.link == link)
            case FailStep(role=role, index=index):
                if (worker := self._worker(role, index)) is not None:
                    worker.engine.fail_next = True
            case RestartRouter(index=index):
                self.front(index).process.kill()
                self.fronts[index % len(self.fronts)] = self._new_front()

    def _process(self, who: tuple[str, int]) -> Process | None:
        if who[0] == "router":
            return self.front(who[1]).process
        if who[0] == "controller":
            return self._controlling
        worker = self._worker(*who)
        return worker.process if worker else None

    def _worker(self, role: str, index: int) -> WorkerProcess | None:
        alive = self.site.alive(role)
        return alive[index % len(alive)] if alive else None

    def _freeze(self, process: Process, for_s: float) -> None:
        def go_on() -> None:
            self.fabric.stopped.discard(process.name)
            process.go_on()
            self._stir()

        process.stop_short()
        self.fabric.stopped.add(process.name)
        self.network.stopped(process)
        self.world.at(self.world.now + for_s, go_on)

    def _cut(self, one: Process | None, other: Process | None, for_s: float) -> None:
        if one is None or other is None:
            return
        link = frozenset((one.name, other.name))

        def heal() -> None:
            self.fabric.held.discard(link)
            self.network.heal(link)
            self._stir()

        self.fabric.held.add(link)
        self.network.cut(link)
        self.world.at(self.world.now + for_s, heal)

    def _stir(self) -> None:
        """What was held up is due now."""
        for worker in self.site.alive():
            if worker.looper is not None:
                worker.looper.wake()
