"""What is wanted against what runs: decides per pool how many workers to start and which to stop. Pure.

A worker's state::

    STARTING ──loaded and paired──▶ READY ──unwanted──▶ DRAINING ──▶ (gone)
        │                             │
        └──────── died, or failed ────┴──▶ LOST ──buried──▶ (gone)

A lost worker holds no unit: its replacement may start while it is being buried. A draining one holds its unit until
it is gone.
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
    """number: the counter of the worker's id; a higher one started later."""

    worker_id: str
    number: int
    state: WorkerState


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
    """wanted: number of workers; None: one for each unit that nodes offer. offered: units of all nodes, used ones too."""

    wanted: int | None
    offered: int
    workers: tuple[WorkerView, ...] = ()
    failures: StartFailures = StartFailures()

    def ids(self, *states: WorkerState) -> list[str]:
        """Workers in one of `states`, oldest first."""
        return [w.worker_id for w in sorted(self.workers, key=lambda w: w.number) if w.state in states]


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
    ready, starting = pool.ids(WorkerState.READY), pool.ids(WorkerState.STARTING)
    draining = pool.ids(WorkerState.DRAINING)
    num_active = len(ready) + len(starting)

    surplus = max(0, num_active - target)
    stop = tuple((starting[::-1] + ready[::-1])[:surplus])  # what serves nobody goes first, then the youngest

    free_units = max(0, pool.offered - num_active - len(draining))
    may_start = not pool.failures.gave_up and now_s >= pool.failures.retry_at_s
    start = min(max(0, target - num_active), free_units) if may_start else 0
    return PoolPlan(wanted, start, stop, _reason(pool, wanted))


def _reason(pool: PoolView, wanted: int) -> str:
    if len(pool.ids(WorkerState.READY)) == wanted and not pool.ids(WorkerState.DRAINING):
        return ""
    return "; ".join(_causes(pool, wanted)) or f"{len(pool.ids(WorkerState.READY))} of {wanted} ready"


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
    if num_ready > wanted:
        yield f"{num_ready - wanted} to be stopped"
