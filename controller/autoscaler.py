"""Asks the workers what they have to do, lets the policy decide, and passes its wishes on, with the reason."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

from controller.autoscale import DecodeSample, Memory, PoolSample, PrefillSample, Sample, decide
from controller.controller import Controller
from controller.launcher import WorkerDied
from controller.reconcile import PREFILL, ROLES, WorkerState
from controller.table import Worker
from tandem.config import AutoscaleConfig
from tandem.v1 import worker_pb2

__all__ = ["Autoscaler"]

log = logging.getLogger(__name__)

_ANSWER_S = 3.0


@dataclass(frozen=True, slots=True)
class _Report:
    load: worker_pb2.WorkerLoad
    heard_s: float


class Autoscaler:
    """last_reason: by role, of the last look."""

    def __init__(self, controller: Controller, config: AutoscaleConfig) -> None:
        self.last_reason: dict[str, str] = {}
        self._controller = controller
        self._config = config
        self._memories = {role: Memory() for role in ROLES}
        self._reports: dict[str, _Report] = {}

    async def run(self) -> None:
        """Until cancelled."""
        log.info("the pools are scaled by policy: %s", self._config)
        while True:
            await asyncio.sleep(self._config.every_s)
            await self.look()

    async def look(self) -> None:
        """Once: ask, decide, wish."""
        for role in ROLES:
            workers = self._controller.roster.of(role, WorkerState.READY)
            pool = self._controller.roster.pools[role]
            samples = [sample for sample in await asyncio.gather(*map(self._sample, workers)) if sample is not None]
            view = PoolSample(role, pool.wanted, len(workers), pool.offered, samples)
            decision, self._memories[role] = decide(view, self._memories[role], self._config, time.monotonic())
            if decision.reason != self.last_reason.get(role):
                log.info("autoscaler: %s", decision.reason)
                self.last_reason[role] = decision.reason
            if decision.wanted is not None:
                await self._controller.scale({role: decision.wanted}, f"autoscaler, {decision.reason.partition(': ')[2]}")
        known = self._controller.roster.workers
        self._reports = {worker_id: report for worker_id, report in self._reports.items() if worker_id in known}

    async def _sample(self, worker: Worker) -> Sample | None:
        """None: it gave no numbers, or none yet to compare with."""
        before = self._reports.get(worker.worker_id)
        try:
            async with asyncio.timeout(_ANSWER_S):
                load = worker_pb2.WorkerLoad.FromString(await worker.handle.load())
        except (WorkerDied, TimeoutError):
            return None
        now_s = time.monotonic()
        self._reports[worker.worker_id] = _Report(load, now_s)
        if worker.role != PREFILL:
            kv_used = _share(load.kv_blocks_used, load.kv_blocks_total)
            slots_used = _share(load.state_slots_used, load.state_slots_total)
            return DecodeSample(worker.worker_id, 0.0, kv_used, slots_used, load.step_seconds if load.running else 0.0)
        if before is None or now_s <= before.heard_s:
            return None
        busy = (load.busy_seconds - before.load.busy_seconds) / (now_s - before.heard_s)
        return PrefillSample(worker.worker_id, 0.0, load.oldest_wait_seconds, load.queue_tokens, busy)


def _share(used: int, total: int) -> float:
    return used / total if total else float("nan")
