"""What is done to workers, to which, and when. Choosing is pure; doing is a signal."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import random
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem.v1 import operations_pb2

__all__ = ["Fault", "FaultKind", "Injector", "choose"]


class FaultKind(enum.Enum):
    KILL = "killed"  # SIGKILL
    FREEZE = "frozen for good"  # SIGSTOP: the controller must find it and kill it
    WAKE = "frozen, woken late"  # so late that its requests have moved on, about when the controller kills it
    BLINK = "frozen, woken early"  # before anybody takes it for dead
    SLOW = "slowed down"  # stopped most of the time, never for long
    TERM = "asked to end"  # SIGTERM


_WEIGHTS = {
    FaultKind.KILL: 4,
    FaultKind.FREEZE: 2,
    FaultKind.WAKE: 2,
    FaultKind.BLINK: 2,
    FaultKind.SLOW: 1,
    FaultKind.TERM: 1,
}
_PASSING = frozenset({FaultKind.BLINK, FaultKind.SLOW})
_SLOW_STOPPED_S, _SLOW_RUNNING_S = 0.3, 0.05


@dataclass(frozen=True, slots=True)
class Fault:
    """lasts_s: of those that are ended by us."""

    kind: FaultKind
    role: str
    worker_id: str
    lasts_s: float = 0.0


def choose(rng: random.Random, healthy: Mapping[str, Sequence[str]], spare: int) -> Fault | None:
    """One fault for one of the healthy workers (ids by role). Those that take a worker away leave `spare` of its pool; when
    no pool has so many, one that passes is chosen. None: no worker is healthy."""
    roles = [role for role, workers in sorted(healthy.items()) if len(workers) > spare]
    kinds = list(_WEIGHTS) if roles else [kind for kind in _WEIGHTS if kind in _PASSING]
    roles = roles or [role for role, workers in sorted(healthy.items()) if workers]
    if not roles:
        return None
    role = rng.choice(roles)
    kind = rng.choices(kinds, weights=[_WEIGHTS[kind] for kind in kinds])[0]
    lasts_s = {FaultKind.WAKE: (3.2, 9.0), FaultKind.BLINK: (0.3, 2.5), FaultKind.SLOW: (1.0, 4.0)}.get(kind, (0.0, 0.0))
    return Fault(kind, role, rng.choice(sorted(healthy[role])), rng.uniform(*lasts_s))


class Injector:
    """Harms workers of this machine. injected: what was done, by kind and role."""

    def __init__(self, seed: int, spare: int) -> None:
        self.injected: Counter[tuple[FaultKind, str]] = Counter()
        self.frozen_pids: set[int] = set()
        self._rng = random.Random(seed)
        self._spare = spare
        self._harmed: set[str] = set()
        self._ending: set[asyncio.Task[None]] = set()

    def next_pause_s(self) -> float:
        return self._rng.uniform(1.5, 4.0)

    def strike(self, workers: Sequence[operations_pb2.WorkerStatus]) -> Fault | None:
        """Choose and do. workers: as the router sees them now."""
        healthy = {
            role: [w.id for w in workers if w.role == role and w.state == "ready" and w.id not in self._harmed]
            for role in ("prefill", "decode")
        }
        fault = choose(self._rng, healthy, self._spare)
        if fault is not None:
            self._do(fault, next(w.pid for w in workers if w.id == fault.worker_id))
            self.injected[fault.kind, fault.role] += 1
        return fault

    async def finish(self) -> None:
        """Until every fault that ends by itself has ended."""
        await asyncio.gather(*self._ending)

    def _do(self, fault: Fault, pid: int) -> None:
        self._harmed.add(fault.worker_id)
        if fault.kind is FaultKind.KILL:
            _send(pid, signal.SIGKILL)
        elif fault.kind is FaultKind.TERM:
            _send(pid, signal.SIGTERM)
        elif fault.kind is FaultKind.FREEZE:
            self.frozen_pids.add(pid)
            _send(pid, signal.SIGSTOP)
        else:
            task = asyncio.create_task(self._harm_for_a_while(fault, pid))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def _harm_for_a_while(self, fault: Fault, pid: int) -> None:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + fault.lasts_s
        stopped_s = _SLOW_STOPPED_S if fault.kind is FaultKind.SLOW else fault.lasts_s
        while loop.time() < until_s:
            _send(pid, signal.SIGSTOP)
            await asyncio.sleep(stopped_s)
            _send(pid, signal.SIGCONT)
            await asyncio.sleep(_SLOW_RUNNING_S)
        if fault.kind in _PASSING:
            self._harmed.discard(fault.worker_id)


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
