"""What the controller tells people: plain values that travel to the command line."""

from __future__ import annotations

from dataclasses import dataclass

from controller.events import Event

__all__ = ["Overview", "PoolOverview", "WorkerOverview"]


@dataclass(frozen=True, slots=True)
class WorkerOverview:
    """loaded_bytes of total_bytes: how far a starting worker's weights are; both 0 before it knows."""

    worker_id: str
    role: str
    state: str
    loaded_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class PoolOverview:
    """reason: why `ready` is not `wanted`. failure: set when starting was given up; the sentence for people."""

    wanted: int
    ready: int
    reason: str
    failure: str


@dataclass(frozen=True, slots=True)
class Overview:
    """pools: by role. model_name: of the workers that are ready; empty while there are none.
    events: the newest, oldest first."""

    pools: dict[str, PoolOverview]
    workers: tuple[WorkerOverview, ...]
    model_name: str
    events: tuple[Event, ...] = ()

    def is_ready(self) -> bool:
        """Every pool has all the workers that are wanted, and at least one."""
        return all(pool.ready >= pool.wanted and pool.ready > 0 for pool in self.pools.values())

    def failure(self) -> str:
        """The first pool's failure; empty: none gave up."""
        return next((pool.failure for pool in self.pools.values() if pool.failure), "")
