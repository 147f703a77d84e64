"""What the controller knows of each worker and of each pool."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from controller.launcher import WorkerHandle
from controller.reconcile import PoolPlan, StartFailures, WorkerState

__all__ = ["Pool", "Worker"]


@dataclass(eq=False, slots=True)
class Worker:
    """description: known once its start has ended."""

    worker_id: str
    number: int
    role: str
    handle: WorkerHandle
    state: WorkerState = WorkerState.STARTING
    progress: tuple[int, int] = (0, 0)
    description: bytes = b""
    task: asyncio.Task[None] | None = None

    def note_progress(self, loaded_bytes: int, total_bytes: int) -> None:
        self.progress = (loaded_bytes, total_bytes)


@dataclass(slots=True)
class Pool:
    wanted: int | None
    offered: int = 0
    failures: StartFailures = field(default_factory=StartFailures)
    plan: PoolPlan = field(default_factory=lambda: PoolPlan(0, 0, (), ""))
