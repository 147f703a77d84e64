"""What the controller knows of each worker and of each pool."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from controller.launcher import WorkerHandle
from controller.reconcile import PoolPlan, StartFailures, WorkerState, WorkerView
from controller.saved import WorkerRecord

__all__ = ["Pool", "Worker"]


@dataclass(eq=False, slots=True)
class Worker:
    """description: known once its start has ended. retiring: see `WorkerView`. reason, drain_s: why it drains, and for how
    long at most (None: as long as it is configured to)."""

    worker_id: str
    number: int
    role: str
    handle: WorkerHandle
    state: WorkerState = WorkerState.STARTING
    progress: tuple[int, int] = (0, 0)
    description: bytes = b""
    task: asyncio.Task[None] | None = None
    retiring: bool = False
    reason: str = ""
    drain_s: float | None = None

    def note_progress(self, loaded_bytes: int, total_bytes: int) -> None:
        self.progress = (loaded_bytes, total_bytes)

    @property
    def node_id(self) -> str:
        """Ray's id of the node that it is on; empty: not known yet."""
        process = self.handle.process_record
        return process[0] if process else ""

    def view(self, *, is_offered: bool = True) -> WorkerView:
        return WorkerView(self.worker_id, self.number, self.state, self.retiring, is_offered)

    def record(self) -> WorkerRecord:
        return WorkerRecord(
            self.worker_id,
            self.number,
            self.role,
            self.state.value,
            self.description,
            self.handle.process_record,
            self.reason,
            self.drain_s,
            self.retiring,
        )

    @classmethod
    def of(cls, record: WorkerRecord, handle: WorkerHandle) -> Worker:
        return cls(
            record.worker_id,
            record.number,
            record.role,
            handle,
            WorkerState(record.state),
            description=record.description,
            retiring=record.retiring,
            reason=record.reason,
            drain_s=record.drain_s,
        )


@dataclass(slots=True)
class Pool:
    """vacancies: workers that are gone while the wish is what it was; those that start next take their places."""

    wanted: int | None
    offered: int = 0
    failures: StartFailures = field(default_factory=StartFailures)
    plan: PoolPlan = field(default_factory=lambda: PoolPlan(0, 0, (), ""))
    vacancies: deque[str] = field(default_factory=lambda: deque(maxlen=64))
