"""What is wanted against what runs: decides per pool how many workers to start and which to stop. Pure.

A worker's state::

    STARTING ──loaded and paired──▶ READY ──unwanted──▶ DRAINING ──▶ (gone)
        │                             │
        └──────── died, or failed ────┴──▶ LOST ──buried──▶ (gone)

A lost worker holds no unit: its replacement may start while it is being buried. A draining one holds its unit until
it is gone. Workers that retire are replaced one at a time: where a unit is free the newcomer is ready before the old one
drains, else the old one makes room first.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = [
    "DECODE",
    "PREFILL",
    "ROLES",
    "PoolPlan",
    "PoolView",
    "StartFailures",
    "WorkerState",
    "WorkerView",
    "after_failure",
    "reconcile",
]

PREFILL = "prefill"
DECODE = "decode"
ROLES = (PREFILL, DECODE)

FIRST_BACKOFF_S = 1.0
LONGEST_BACKOFF_S = 30.0
MOST_FAILURES = 5


class WorkerState(enum.Enum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class WorkerView:
    """number: the counter of the worker's id; a higher one started later. retiring: it serves until another is ready in its
    place, where a unit is free for that; else it makes room for it. is_offered: its unit is one of those offered; False: its
    node is cordoned."""

    worker_id: str
    number: int
    state: WorkerState
    retiring: bool = False
    is_offered: bool = True


@dataclass(frozen=True, slots=True)
class StartFailures:
    """Failed starts in a row; one worker that becomes ready wipes them out.

    retry_at_s: no start before this moment of the controller's clock. gave_up: none until wishes or nodes change.
    """

    count: int = 0
    reason: str = ""
    retry_at_s: float = 0.0
    gave_up: bool = False


@dataclass(frozen=True, slots=True)
class PoolView:
    """wanted: number of workers; None: one for each unit that nodes offer. offered: units of all nodes but the cordoned ones,
    used ones too."""

    wanted: int | None
    offered: int
    workers: tuple[WorkerView, ...] = ()
    failures: StartFailures = StartFailures()

    def ids(self, *states: WorkerState) -> list[str]:
        """Workers in one of `states`, oldest first."""
        return [w.worker_id for w in sorted(self.workers, key=lambda w: w.number) if w.state in states]

    def retiring(self) -> list[str]:
        """Ready workers that are to be replaced, oldest first."""
        ready = self.ids(WorkerState.READY)
        return [w.worker_id for w in sorted(self.workers, key=lambda w: w.number) if w.retiring and w.worker_id in ready]


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """wanted: the wish as a number. start: how many to start now. stop: which to drain and stop, in this order.
    reason: why fewer or more than `wanted` are ready; empty when they are as wanted."""

    wanted: int
    start: int
    stop: tuple[str, ...]
    reason: str


def after_failure(failures: StartFailures, reason: str, now_s: float, *, hopeless: bool) -> StartFailures:
    """The record after one more failed start. hopeless: trying again cannot help (the operator's input is wrong)."""
    count = failures.count + 1
    backoff_s = min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** (count - 1))
    return StartFailures(count, reason, now_s + backoff_s, gave_up=hopeless or count >= MOST_FAILURES)


def reconcile(pool: PoolView, now_s: float) -> PoolPlan:
    """The plan for one pool. Starting and stopping never happen in one plan."""
    wanted = pool.offered if pool.wanted is None else pool.wanted
    target = min(wanted, pool.offered)
    num_active = len(pool.ids(WorkerState.READY, WorkerState.STARTING))
    holding = [worker for worker in pool.workers if worker.state is not WorkerState.LOST and worker.is_offered]
    free_units = max(0, pool.offered - len(holding))
    may_start = not pool.failures.gave_up and now_s >= pool.failures.retry_at_s

    stop = _to_stop(pool, num_active - target, may_start and free_units > 0)
    missing = target - num_active
    if missing == 0 and not stop and pool.retiring() and not pool.ids(WorkerState.STARTING, WorkerState.DRAINING):
        missing = 1  # beside the one whose place it takes
    start = min(max(0, missing), free_units) if may_start else 0
    return PoolPlan(wanted, start, stop, _reason(pool, wanted))


def _to_stop(pool: PoolView, surplus: int, can_start: bool) -> tuple[str, ...]:
    """Those that retire go first, one at a time; else what serves nobody, then the youngest."""
    starting, ready, retiring = pool.ids(WorkerState.STARTING), pool.ids(WorkerState.READY), pool.retiring()
    num_active = len(starting) + len(ready)
    if retiring and starting and 0 < surplus < num_active:
        surplus -= 1  # the newcomer is not ready yet: the one that it replaces serves on
    elif retiring and surplus == 0 and not (starting or can_start or pool.ids(WorkerState.DRAINING) or pool.failures.count):
        surplus = 1  # no unit is free for a newcomer: one of those that retire makes room
    order = retiring + [worker_id for worker_id in starting[::-1] + ready[::-1] if worker_id not in retiring]
    return tuple(order[: max(0, surplus)])


def _reason(pool: PoolView, wanted: int) -> str:
    if len(pool.ids(WorkerState.READY)) == wanted and not pool.ids(WorkerState.DRAINING) and not pool.retiring():
        return ""
    return "; ".join(_causes(pool, wanted)) or f"{wanted - len(pool.ids(WorkerState.READY))} to be started"


def _causes(pool: PoolView, wanted: int) -> Iterable[str]:
    num_ready, num_starting = len(pool.ids(WorkerState.READY)), len(pool.ids(WorkerState.STARTING))
    num_draining = len(pool.ids(WorkerState.DRAINING))
    failures = pool.failures
    if wanted > pool.offered:
        yield f"{wanted} wanted, nodes offer {pool.offered} {'unit' if pool.offered == 1 else 'units'}"
    if failures.count and num_ready < min(wanted, pool.offered):
        if failures.gave_up:
            yield f"gave up after {failures.count} failed {'start' if failures.count == 1 else 'starts'}: {failures.reason}"
        else:  # no countdown here: every change of the text is published to routers
            yield f"start {failures.count} failed, it is tried again: {failures.reason}"
    if num_starting:
        yield f"{num_starting} starting"
    if num_draining:
        yield f"{num_draining} draining"
    if pool.retiring():
        yield f"{len(pool.retiring())} to be replaced"
    elif num_ready > wanted:
        yield f"{num_ready - wanted} to be stopped"
