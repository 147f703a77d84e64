"""The controller without Ray and gRPC: one task per worker, and a loop that compares what is wanted with what runs.

The table of workers is only touched between awaits of one event loop, so it needs no lock. Pairing has one: of two
workers that become ready together, the second must see the first.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections import deque
from collections.abc import Mapping

from controller.launcher import WorkerDied, WorkerLauncher
from controller.life import Timing, bury, start_bounded, stop_bounded, until_end
from controller.overview import Overview, PoolOverview, WorkerOverview
from controller.reconcile import (
    DECODE,
    PREFILL,
    ROLES,
    PoolPlan,
    PoolView,
    StartFailures,
    WorkerState,
    WorkerView,
    after_failure,
    reconcile,
)
from controller.table import Pool, Worker
from tandem.clock import Clock, MonotonicClock
from tandem.errors import ConfigError, TandemError
from tandem.v1 import worker_pb2

__all__ = ["Controller"]

log = logging.getLogger(__name__)

_KEPT_INCIDENTS = 20


class Controller:
    """Keeps the pools as wished and publishes who is ready.

    wishes: wanted workers by role; None: one for each unit that nodes offer. config_json: by role, for the launcher.
    """

    def __init__(
        self,
        launcher: WorkerLauncher,
        wishes: Mapping[str, int | None],
        config_json: str,
        *,
        timing: Timing = Timing(),  # noqa: B008 - frozen
        clock: Clock | None = None,
    ) -> None:
        self._launcher = launcher
        self._config_json = config_json
        self._timing = timing
        self._clock = clock or MonotonicClock()
        self._life = secrets.token_hex(2)
        self._numbers = itertools.count(1)
        self._pools = {role: Pool(wishes[role]) for role in ROLES}
        self._workers: dict[str, Worker] = {}
        self._incidents: deque[tuple[int, str]] = deque(maxlen=_KEPT_INCIDENTS)
        self._incident_numbers = itertools.count(1)
        self._pairing = asyncio.Lock()
        self._stepping = asyncio.Lock()
        self._stopping = False
        self._news = asyncio.Event()  # something happened that may need a new plan
        self._published = asyncio.Event()  # replaced at every new snapshot, after it was set
        self._snapshot = worker_pb2.MembershipSnapshot()

    # ---- the loop ----

    async def run(self) -> None:
        """Until `shutdown`: look, decide, act, publish, wait."""
        while not self._stopping:
            await self.step()
            self._news.clear()
            try:
                async with asyncio.timeout(self._timing.look_s):
                    await self._news.wait()
            except TimeoutError:
                continue

    async def step(self) -> None:
        """One round of the loop."""
        async with self._stepping:
            offered = await self._launcher.offered()
            if not self._stopping:
                await self._act(offered)
                self._publish()

    async def _act(self, offered: Mapping[str, int]) -> None:
        for role, pool in self._pools.items():
            if pool.offered != offered.get(role, 0):
                pool.offered, pool.failures = offered.get(role, 0), StartFailures()
            plan = self._decide(role)
            for worker_id in plan.stop:
                self._begin_stop(self._workers[worker_id])
            for _ in range(plan.start):
                await self._begin_start(role)
            if plan.start or plan.stop:
                self._decide(role)

    def _decide(self, role: str) -> PoolPlan:
        pool = self._pools[role]
        workers = tuple(WorkerView(w.worker_id, w.number, w.state) for w in self._workers.values() if w.role == role)
        pool.plan = reconcile(PoolView(pool.wanted, pool.offered, workers, pool.failures), self._clock.now())
        return pool.plan

    async def _begin_start(self, role: str) -> None:
        number = next(self._numbers)
        worker_id = f"{role}-{self._life}-{number}"
        try:
            handle = await self._launcher.launch(role, worker_id, self._config_json)
        except WorkerDied as error:
            self._note_failed_start(role, worker_id, error)
            return
        worker = Worker(worker_id, number, role, handle)
        self._workers[worker_id] = worker
        worker.task = asyncio.create_task(self._live(worker), name=worker_id)

    def _begin_stop(self, worker: Worker) -> None:
        worker.state = WorkerState.DRAINING
        life = worker.task
        if life is not None:
            life.cancel()  # here and not later: it must not turn ready any more
        worker.task = asyncio.create_task(self._stop(worker, life), name=f"stop {worker.worker_id}")

    # ---- one worker ----

    async def _live(self, worker: Worker) -> None:
        """A worker from its start to its burial; the loop replaces it."""
        try:
            worker.description = await start_bounded(worker.handle, self._timing, worker.note_progress)
            await self._pair_and_publish(worker)
        except (WorkerDied, TandemError, TimeoutError) as error:
            self._note_failed_start(worker.role, worker.worker_id, error)
        except Exception as error:  # the worker's life ends here, with its reason kept
            log.exception("start of %s", worker.worker_id)
            self._note_failed_start(worker.role, worker.worker_id, error)
        else:
            reason = await until_end(worker.handle, self._timing)
            self._note_incident(f"{worker.worker_id} is lost: {reason}")
        worker.state = WorkerState.LOST
        self._publish()
        self._news.set()
        await self._remove(worker)

    async def _pair_and_publish(self, worker: Worker) -> None:
        """Connect the newcomer with every ready worker of the other pool, then show it to routers.

        Raises:
            WorkerDied: a peer that is still there refuses it, or it refuses the peer.
        """
        async with self._pairing, asyncio.timeout(self._timing.connect_s):
            peers = [w for w in self._workers.values() if w.role != worker.role and w.state is WorkerState.READY]
            if worker.role == PREFILL:
                refusals = await worker.handle.connect([peer.description for peer in peers])
            else:
                replies = await asyncio.gather(*(self._connect(peer, worker) for peer in peers))
                refusals = [refusal for reply in replies for refusal in reply]
            for peer_id, reason in refusals:
                if peer_id == worker.worker_id or self._is_ready(peer_id):
                    raise WorkerDied(f"{worker.worker_id} does not fit the other pool: {reason}")
            worker.state = WorkerState.READY
        self._pools[worker.role].failures = StartFailures()
        self._decide(worker.role)
        self._publish()
        self._news.set()

    def _is_ready(self, worker_id: str) -> bool:
        worker = self._workers.get(worker_id)
        return worker is not None and worker.state is WorkerState.READY

    async def _connect(self, prefill: Worker, decode: Worker) -> list[tuple[str, str]]:
        """One that does not answer goes on connecting by itself when it can, and must not hold up the newcomer."""
        try:
            async with asyncio.timeout(self._timing.answer_s):
                return await prefill.handle.connect([decode.description])
        except (WorkerDied, TimeoutError):
            return []

    def _note_failed_start(self, role: str, worker_id: str, error: Exception) -> None:
        pool = self._pools[role]
        reason = " ".join(str(error).split()) or type(error).__name__
        hopeless = isinstance(error, ConfigError)
        pool.failures = after_failure(pool.failures, reason, self._clock.now(), hopeless=hopeless)
        self._decide(role)
        self._note_incident(f"start of {worker_id} failed: {reason}")

    def _note_incident(self, text: str) -> None:
        log.warning("%s", text)
        self._incidents.append((next(self._incident_numbers), text))

    async def _stop(self, worker: Worker, life: asyncio.Task[None] | None) -> None:
        if life is not None:
            await asyncio.wait({life})
        await stop_bounded(worker.handle, self._timing.shutdown_s if self._stopping else self._timing.stop_s)
        await self._remove(worker)

    async def _remove(self, worker: Worker) -> None:
        """The process ends for certain, then peers are told: they may reuse memory that it could have written."""
        while not await bury(worker.handle, self._timing):
            log.error("the process of %s is not known to be gone: its peers keep what it may still write to", worker.worker_id)
        self._workers.pop(worker.worker_id, None)
        self._publish()
        self._news.set()
        peers = [w for w in self._workers.values() if w.role != worker.role and w.description]
        await asyncio.gather(*(self._disconnect(peer, worker.worker_id) for peer in peers))

    async def _disconnect(self, peer: Worker, worker_id: str) -> None:
        try:
            async with asyncio.timeout(self._timing.answer_s):
                await peer.handle.disconnect(worker_id)
        except (WorkerDied, TimeoutError) as error:
            log.info("%s was not told that %s is gone: %s", peer.worker_id, worker_id, error)

    # ---- what others see ----

    def _publish(self) -> None:
        snapshot = worker_pb2.MembershipSnapshot(version=self._snapshot.version)
        for worker in self._workers.values():
            if worker.description and worker.state in (WorkerState.READY, WorkerState.DRAINING):
                description = worker_pb2.WorkerDescription.FromString(worker.description)
                snapshot.members.add(worker=description, state=worker.state.value)
        for role, pool in self._pools.items():
            snapshot.pools[role].CopyFrom(worker_pb2.PoolWish(wanted=pool.plan.wanted, reason=pool.plan.reason))
        if snapshot != self._snapshot or not self._snapshot.version:
            snapshot.version += 1
            self._snapshot = snapshot
            published, self._published = self._published, asyncio.Event()
            published.set()

    async def snapshot_after(self, version: int) -> worker_pb2.MembershipSnapshot:
        """The newest snapshot, as soon as it is newer than `version`; 0: the first there is."""
        while self._snapshot.version <= version:
            await self._published.wait()
        return self._snapshot

    def overview(self) -> Overview:
        ready = [w for w in self._workers.values() if w.state is WorkerState.READY]
        pools = {
            role: PoolOverview(
                wanted=pool.plan.wanted,
                ready=sum(w.role == role for w in ready),
                reason=pool.plan.reason,
                failure=pool.failures.reason if pool.failures.gave_up else "",
            )
            for role, pool in self._pools.items()
        }
        workers = (WorkerOverview(w.worker_id, w.role, w.state.value, *w.progress) for w in self._workers.values())
        model = worker_pb2.WorkerDescription.FromString(ready[0].description).model.name if ready else ""
        return Overview(pools, tuple(workers), model, tuple(self._incidents))

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

    async def shutdown(self) -> None:
        """Stop everything in order, writers first; bounded. The loop ends."""
        self._stopping = True
        self._news.set()
        async with self._stepping:  # a round in progress may still be starting workers
            pass
        for role in (PREFILL, DECODE):
            for worker in [w for w in self._workers.values() if w.role == role]:
                if worker.state is not WorkerState.DRAINING:
                    self._begin_stop(worker)
            self._publish()
            tasks = {w.task for w in self._workers.values() if w.role == role and w.task is not None}
            if tasks:
                await asyncio.wait(tasks, timeout=self._timing.shutdown_s + self._timing.kill_s)
