"""The controller without Ray and gRPC: a loop that compares what is wanted with what runs, and what operators may ask of it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from controller.events import EventKind
from controller.launcher import WorkerLauncher
from controller.life import Timing
from controller.lives import Lives
from controller.overview import Overview
from controller.reconcile import DECODE, PREFILL, ROLES, StartFailures, WorkerState
from controller.roster import Roster
from controller.saved import MemoryStore, StateStore
from tandem.clock import Clock, MonotonicClock
from tandem.errors import InvalidRequest, TandemError
from tandem.v1 import worker_pb2

__all__ = ["MOST_WORKERS", "Controller", "UnknownNode", "UnknownWorker"]

MOST_WORKERS = 4096
_LONGEST_DRAIN_S = 86_400.0


class UnknownWorker(TandemError):
    """No worker of this id runs, or it drains already. The operator looks at `tandem status`."""


class UnknownNode(TandemError):
    """No node is there, or it is not cordoned. The operator looks at `tandem status`."""


class Controller:
    """Keeps the pools as wished and publishes who is ready.

    wishes: wanted workers by role; None: one for each unit that nodes offer. config_json: for the launcher. store: where a
    next life of this controller finds wishes and workers; what an earlier one left there is in force before `wishes`.
    """

    def __init__(
        self,
        launcher: WorkerLauncher,
        wishes: Mapping[str, int | None],
        config_json: str,
        *,
        timing: Timing = Timing(),  # noqa: B008 - frozen
        clock: Clock | None = None,
        store: StateStore | None = None,
    ) -> None:
        clock = clock or MonotonicClock()
        self.roster = Roster(wishes, clock, store or MemoryStore())
        self._launcher = launcher
        self._timing = timing
        self._lives = Lives(launcher, self.roster, config_json, timing, clock)
        self._stepping = asyncio.Lock()
        self._stopping = False
        self._resumed = False

    # ---- the loop ----

    async def run(self) -> None:
        """Until `shutdown`: look, decide, act, publish, wait."""
        while not self._stopping:
            await self.step()
            self.roster.news.clear()
            try:
                async with asyncio.timeout(self._timing.look_s):
                    await self.roster.news.wait()
            except TimeoutError:
                continue

    async def step(self) -> None:
        """One round of the loop."""
        async with self._stepping:
            await self.resume()
            nodes = await self._launcher.nodes()
            if not self._stopping:
                self.roster.avoided = frozenset(node.id for node in nodes if node.address in self.roster.cordoned)
                self._clear_cordoned()
                for role in ROLES:
                    offers = (node.units.get(role, 0) for node in nodes if node.id not in self.roster.avoided)
                    self.roster.note_offer(role, sum(offers))
                    await self._act(role)
                self.roster.publish()
                await self.roster.save()

    async def resume(self) -> None:
        """Take up what an earlier life left; once. Nothing is published before: routers would let go of what they use."""
        if self._resumed:
            return
        self._resumed = True
        state = await self.roster.restore()
        if state is not None:
            await self._lives.resume(state.workers)
            text = f"the controller is back and takes up {len(state.workers)} workers"
            self.roster.note(EventKind.RESUMED, "controller", text)

    async def _act(self, role: str) -> None:
        plan = self.roster.decide(role)
        for worker_id in plan.stop:
            worker = self.roster.workers[worker_id]
            self._lives.begin_stop(worker, self._why_stopped(role, retiring=worker.retiring))
        for _ in range(plan.start):
            await self._lives.begin(role)
        if plan.start or plan.stop:
            self.roster.decide(role)

    def _why_stopped(self, role: str, *, retiring: bool) -> str:
        pool = self.roster.pools[role]
        if retiring:
            return "it is replaced"
        return f"{pool.plan.wanted} {role} wanted" if pool.plan.wanted <= pool.offered else f"nodes offer {pool.offered} units"

    # ---- what operators ask ----

    async def scale(self, wishes: Mapping[str, int | None], reason: str = "") -> dict[str, worker_pb2.PoolWish]:
        """Change how many workers are wanted; None: one for each unit that nodes offer. Returns how the pools named are now,
        with the reason where they are not so yet.

        Raises:
            InvalidRequest: an unknown pool, or a number that no cluster has.
        """
        for role, wanted in wishes.items():
            _require_pool(role)
            if wanted is not None and not 0 <= wanted <= MOST_WORKERS:
                raise InvalidRequest(f"wanted[{role}]", f"must be from 0 to {MOST_WORKERS}, not {wanted}")
        for role, wanted in wishes.items():
            pool = self.roster.pools[role]
            before, pool.wanted, pool.failures = pool.plan.wanted, wanted, StartFailures()
            pool.vacancies.clear()
            text = f"{role} scaled from {before} to {'all that nodes offer' if wanted is None else wanted}"
            text += f": {reason}" if reason else ""
            self.roster.note(EventKind.SCALED, role, text)
            self.roster.decide(role)
        await self.roster.save()
        self.roster.news.set()
        return {role: self.roster.pool_wish(role) for role in wishes}

    async def drain(self, worker_id: str, drain_s: float | None = None) -> None:
        """Let one worker end in order; the wish stays, so another takes its place. Returns when it has begun.

        drain_s: how long what runs may go on there; None: the configured time.

        Raises:
            UnknownWorker: it does not run, or drains already. InvalidRequest: drain_s is no sensible time.
        """
        _require_drain_s(drain_s)
        worker = self.roster.workers.get(worker_id)
        if worker is None:
            raise UnknownWorker(f"no worker {worker_id!r} runs; `tandem status` shows those that do")
        if worker.state in (WorkerState.DRAINING, WorkerState.LOST):
            raise UnknownWorker(f"{worker_id} is {worker.state.value} already")
        self.roster.pools[worker.role].vacancies.append(worker_id)
        self._lives.begin_stop(worker, "an operator drains it", drain_s)
        await self._published()

    async def drain_node(self, host: str, drain_s: float | None = None) -> list[str]:
        """The host gets no more workers, and those that it has end in order; where other nodes have units free, others take
        their places. Returns those that drain now. It holds until `uncordon`, also for a node that comes back there.

        host: address or name. drain_s: as for `drain`.

        Raises:
            UnknownNode: there is none. InvalidRequest: drain_s is no sensible time.
        """
        _require_drain_s(drain_s)
        nodes = await self._launcher.nodes()
        found = [node for node in nodes if host in (node.address, node.name, node.id)]
        if not found:
            raise UnknownNode(f"no node {host!r} is there; there are {', '.join(sorted({n.address for n in nodes})) or 'none'}")
        for address in {node.address for node in found} - self.roster.cordoned:
            self.roster.cordoned.add(address)
            self.roster.note(EventKind.CORDONED, address, f"{address} gets no more workers: an operator drains it")
        self.roster.avoided |= {node.id for node in found}
        drained = self._clear_cordoned(drain_s)
        await self._published()
        return drained

    async def uncordon(self, host: str) -> None:
        """The host may have workers again.

        Raises:
            UnknownNode: it is not cordoned.
        """
        names = {node.name: node.address for node in await self._launcher.nodes()}
        address = host if host in self.roster.cordoned else names.get(host, host)
        if address not in self.roster.cordoned:
            known = ", ".join(sorted(self.roster.cordoned)) or "none"
            raise UnknownNode(f"{host!r} is not among the hosts that get no workers ({known})")
        self.roster.cordoned.discard(address)
        self.roster.note(EventKind.UNCORDONED, address, f"{address} may have workers again")
        await self._published()

    def _clear_cordoned(self, drain_s: float | None = None) -> list[str]:
        """Workers that are on nodes that shall have none begin to drain."""
        drained = []
        for worker in self.roster.workers.values():
            is_active = worker.state in (WorkerState.STARTING, WorkerState.READY)
            if is_active and worker.node_id in self.roster.avoided:
                self.roster.pools[worker.role].vacancies.append(worker.worker_id)
                self._lives.begin_stop(worker, "an operator drains its node", drain_s)
                drained.append(worker.worker_id)
        return drained

    async def _published(self) -> None:
        """What an operator changed is in force, and written down."""
        for role in ROLES:
            self.roster.decide(role)
        self.roster.publish()
        await self.roster.save()
        self.roster.news.set()

    async def replace(self, role: str) -> list[str]:
        """Put a new worker in the place of every one that the pool has now, one after another. Returns the old ones.

        Raises:
            InvalidRequest: there is no such pool.
        """
        _require_pool(role)
        old = self.roster.of(role, WorkerState.READY)
        for worker in old:
            worker.retiring = True
            self.roster.pools[role].vacancies.append(worker.worker_id)
        await self._published()
        return [worker.worker_id for worker in old]

    async def shutdown(self) -> None:
        """Stop everything in order, writers first; bounded. The loop ends."""
        self._stopping = self._lives.shutting_down = True
        self.roster.news.set()
        async with self._stepping:  # a round in progress may still be starting workers
            pass
        for role in (PREFILL, DECODE):
            for worker in self.roster.of(role):
                if worker.state is not WorkerState.DRAINING:
                    self._lives.begin_stop(worker, "everything stops")
            self.roster.publish()
            tasks = {worker.task for worker in self.roster.of(role) if worker.task is not None}
            if tasks:
                await asyncio.wait(tasks, timeout=self._timing.shutdown_s + self._timing.kill_s)
        await self.roster.save()

    # ---- what others see ----

    async def snapshot_after(self, version: int) -> worker_pb2.MembershipSnapshot:
        """See `Roster.snapshot_after`."""
        return await self.roster.snapshot_after(version)

    def overview(self) -> Overview:
        return self.roster.overview()

    async def wait_ready(self, prefill: int, decode: int) -> None:
        """Until so many workers are ready.

        Raises:
            TandemError: a pool gave up starting; its text is the reason.
        """
        version = 0
        while True:
            view = self.overview()
            if view.failure():
                raise TandemError(view.failure())
            if view.pools[PREFILL].ready >= prefill and view.pools[DECODE].ready >= decode:
                return
            version = (await self.snapshot_after(version)).version


def _require_drain_s(drain_s: float | None) -> None:
    if drain_s is not None and not 0 <= drain_s <= _LONGEST_DRAIN_S:
        raise InvalidRequest("timeout_s", f"must be from 0 to {_LONGEST_DRAIN_S:.0f} seconds, not {drain_s}")


def _require_pool(role: str) -> None:
    if role not in ROLES:
        raise InvalidRequest("pool", f"{role!r} is none of {', '.join(ROLES)}")
