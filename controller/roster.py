"""The table of pools and workers, and what others see of it: routers, people, and the controller's own next life.

Touched only between awaits of one event loop, so it needs no lock.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping

from controller.events import EventKind, EventLog
from controller.overview import Overview, PoolOverview, WorkerOverview
from controller.reconcile import ROLES, PoolPlan, PoolView, StartFailures, WorkerState, reconcile
from controller.saved import SavedState, StateStore, WorkerRecord, from_json, to_json
from controller.table import Pool, Worker
from tandem.clock import Clock
from tandem.v1 import operations_pb2, worker_pb2

__all__ = ["Roster"]

log = logging.getLogger(__name__)

_PUBLISHED_EVENTS = 16
_TROUBLES = (EventKind.LOST, EventKind.FAILED)


class Roster:
    """wishes: wanted workers by role; None: one for each unit that nodes offer."""

    def __init__(self, wishes: Mapping[str, int | None], clock: Clock, store: StateStore) -> None:
        self.pools = {role: Pool(wishes[role]) for role in ROLES}
        self.workers: dict[str, Worker] = {}
        self.launching: dict[str, WorkerRecord] = {}  # asked for, and perhaps not there yet
        self.events = EventLog()
        self.port = 0
        self.cordoned: set[str] = set()  # addresses of hosts that get no workers
        self.avoided: frozenset[str] = frozenset()  # ids of the nodes there are on them now
        self.news = asyncio.Event()  # something happened that may need a new plan
        self._life = secrets.token_hex(2)
        self._next_number = 1
        self._clock = clock
        self._store = store
        self._saved = ""
        self._saving = asyncio.Lock()
        self._published = asyncio.Event()  # replaced at every new snapshot, after it was set
        self._snapshot = worker_pb2.MembershipSnapshot()

    # ---- the table ----

    def of(self, role: str, *states: WorkerState) -> list[Worker]:
        return [w for w in self.workers.values() if w.role == role and (w.state in states or not states)]

    def is_ready(self, worker_id: str) -> bool:
        worker = self.workers.get(worker_id)
        return worker is not None and worker.state is WorkerState.READY

    def new_id(self, role: str) -> tuple[str, int]:
        """A worker's id and its number. No id is given twice, by this controller or by its next life."""
        number = self._next_number
        self._next_number += 1
        return f"{role}-{self._life}-{number}", number

    def decide(self, role: str) -> PoolPlan:
        pool = self.pools[role]
        workers = tuple(worker.view(is_offered=worker.node_id not in self.avoided) for worker in self.of(role))
        view = PoolView(pool.wanted, pool.offered, workers, pool.failures)
        pool.plan = reconcile(view, self._clock.now())
        return pool.plan

    def note_offer(self, role: str, num_units: int) -> None:
        pool = self.pools[role]
        if pool.offered != num_units:
            pool.offered, pool.failures = num_units, StartFailures()

    def note(self, kind: EventKind, subject: str, text: str) -> None:
        log.log(logging.WARNING if kind in _TROUBLES else logging.INFO, "%s: %s", kind.value, text)
        self.events.note(kind, subject, text)

    # ---- for the next life ----

    async def restore(self) -> SavedState | None:
        """What an earlier life saved; its wishes, numbers and events are in force again. None: there was none."""
        text = await self._store.load()
        if not text:
            return None
        state = from_json(text)
        self._life, self._next_number, self.port = state.life, state.next_number, state.port
        self.cordoned = set(state.cordoned)
        for role, pool in self.pools.items():
            pool.wanted = state.wishes[role]
        self.events.restore(state.events)
        return state

    async def save(self) -> None:
        async with self._saving:
            records = (*(worker.record() for worker in self.workers.values()), *self.launching.values())
            wishes = {role: pool.wanted for role, pool in self.pools.items()}
            cordoned = tuple(sorted(self.cordoned))
            state = SavedState(self._life, self._next_number, wishes, records, self.events.all, self.port, cordoned)
            if (text := to_json(state)) != self._saved:
                await self._store.save(text)
                self._saved = text

    # ---- for routers ----

    def publish(self) -> None:
        snapshot = worker_pb2.MembershipSnapshot(version=self._snapshot.version, cordoned=sorted(self.cordoned))
        for worker in self.workers.values():
            if worker.description and worker.state in (WorkerState.READY, WorkerState.DRAINING):
                description = worker_pb2.WorkerDescription.FromString(worker.description)
                snapshot.members.add(worker=description, state=worker.state.value)
        for role in self.pools:
            snapshot.pools[role].CopyFrom(self.pool_wish(role))
        for event in self.events.newest(_PUBLISHED_EVENTS):
            told = operations_pb2.ClusterEvent(
                number=event.number, time_s=event.time_s, kind=event.kind.value, subject=event.subject, text=event.text
            )
            snapshot.events.append(told)
        if snapshot != self._snapshot or not self._snapshot.version:
            snapshot.version += 1
            self._snapshot = snapshot
            published, self._published = self._published, asyncio.Event()
            published.set()

    def pool_wish(self, role: str) -> worker_pb2.PoolWish:
        pool = self.pools[role]
        return worker_pb2.PoolWish(
            wanted=pool.plan.wanted,
            reason=pool.plan.reason,
            offered=pool.offered,
            starting=len(self.of(role, WorkerState.STARTING)),
            draining=len(self.of(role, WorkerState.DRAINING)),
        )

    async def snapshot_after(self, version: int) -> worker_pb2.MembershipSnapshot:
        """The newest snapshot, as soon as it is newer than `version`; 0: the first there is."""
        while self._snapshot.version <= version:
            await self._published.wait()
        return self._snapshot

    # ---- for people ----

    def overview(self) -> Overview:
        ready = [w for w in self.workers.values() if w.state is WorkerState.READY]
        pools = {
            role: PoolOverview(
                wanted=pool.plan.wanted,
                ready=sum(w.role == role for w in ready),
                reason=pool.plan.reason,
                failure=pool.failures.reason if pool.failures.gave_up else "",
            )
            for role, pool in self.pools.items()
        }
        workers = (WorkerOverview(w.worker_id, w.role, w.state.value, *w.progress) for w in self.workers.values())
        model = worker_pb2.WorkerDescription.FromString(ready[0].description).model.name if ready else ""
        return Overview(pools, tuple(workers), model, self.events.all)
