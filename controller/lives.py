"""One task per worker, from its start to its burial; and what an earlier controller's workers go on with.

Pairing has a lock: of two workers that become ready together, the second must see the first.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from controller.events import EventKind
from controller.launcher import WorkerDied, WorkerLauncher
from controller.life import Timing, bury, start_bounded, stop_bounded, until_end
from controller.reconcile import DECODE, PREFILL, StartFailures, WorkerState, after_failure
from controller.roster import Roster
from controller.saved import WorkerRecord
from controller.table import Worker
from tandem.clock import Clock
from tandem.errors import ConfigError, TandemError
from tandem.worker_process import TERMINATED

__all__ = ["Lives"]

log = logging.getLogger(__name__)


class Lives:
    """config_json: for the launcher. shutting_down: set when everything ends: stops are short then."""

    def __init__(self, launcher: WorkerLauncher, roster: Roster, config_json: str, timing: Timing, clock: Clock) -> None:
        self.shutting_down = False
        self._launcher = launcher
        self._roster = roster
        self._config_json = config_json
        self._timing = timing
        self._clock = clock
        self._pairing = asyncio.Lock()

    async def begin(self, role: str) -> None:
        worker_id, number = self._roster.new_id(role)
        self._roster.launching[worker_id] = WorkerRecord(worker_id, number, role, WorkerState.STARTING.value)
        await self._roster.save()  # first: the next controller must know of it, and not give the id again
        try:
            handle = await self._launcher.launch(role, worker_id, self._config_json, self._roster.avoided)
        except WorkerDied as error:
            self._note_failed_start(role, worker_id, error)
            return
        finally:
            del self._roster.launching[worker_id]
        worker = Worker(worker_id, number, role, handle)
        self._roster.workers[worker_id] = worker
        if vacancies := self._roster.pools[role].vacancies:
            self._roster.note(EventKind.REPLACED, worker_id, f"{worker_id} starts in the place of {vacancies.popleft()}")
        else:
            self._roster.note(EventKind.STARTED, worker_id, f"{worker_id} starts")
        worker.task = asyncio.create_task(self._live(worker), name=worker_id)

    def begin_stop(self, worker: Worker, reason: str, drain_s: float | None = None) -> None:
        worker.state, worker.reason, worker.drain_s = WorkerState.DRAINING, reason, drain_s
        self._roster.note(EventKind.DRAINING, worker.worker_id, f"{worker.worker_id} takes no more work: {reason}")
        life = worker.task
        if life is not None:
            life.cancel()  # here and not later: it must not turn ready any more
        worker.task = asyncio.create_task(self._stop(worker, life), name=f"stop {worker.worker_id}")

    async def resume(self, records: Sequence[WorkerRecord]) -> None:
        """Workers of an earlier controller go on from where that one left them."""
        workers = [Worker.of(record, await self._launcher.find(record.worker_id, record.process)) for record in records]
        self._roster.workers.update({worker.worker_id: worker for worker in workers})
        for worker in workers:
            worker.task = asyncio.create_task(self._go_on(worker), name=worker.worker_id)

    async def _go_on(self, worker: Worker) -> None:
        match worker.state:
            case WorkerState.STARTING:
                await self._live(worker)
            case WorkerState.READY:
                await self._live_on(worker)
            case WorkerState.DRAINING:
                await self._stop(worker, None)
            case WorkerState.LOST:
                await self._remove(worker)

    # ---- one worker ----

    async def _live(self, worker: Worker) -> None:
        """A worker from its start to its burial; the controller's loop replaces it."""
        try:
            worker.description = await start_bounded(worker.handle, self._timing, worker.note_progress)
            await self._pair_and_publish(worker)
        except (WorkerDied, TandemError, TimeoutError) as error:
            self._note_failed_start(worker.role, worker.worker_id, error)
            await self._bury_lost(worker)
        except Exception as error:  # the worker's life ends here, with its reason kept
            log.exception("start of %s", worker.worker_id)
            self._note_failed_start(worker.role, worker.worker_id, error)
            await self._bury_lost(worker)
        else:
            await self._watch(worker)

    async def _live_on(self, worker: Worker) -> None:
        """One that routers know already. Peers that became ready just before the earlier controller ended may lack it."""
        if worker.role == PREFILL:
            try:
                async with self._pairing, asyncio.timeout(self._timing.answer_s):
                    await self._pair(worker)
            except (WorkerDied, TandemError, TimeoutError) as error:
                log.warning("%s could not be paired again: %s", worker.worker_id, error)
        await self._watch(worker)

    async def _watch(self, worker: Worker) -> None:
        reason = await until_end(worker.handle, self._timing)
        if reason == TERMINATED:
            self._roster.note(EventKind.DRAINED, worker.worker_id, f"{worker.worker_id} has ended in order: {reason}")
        else:
            self._roster.note(EventKind.LOST, worker.worker_id, f"{worker.worker_id} is lost: {reason}")
        self._roster.pools[worker.role].vacancies.append(worker.worker_id)
        await self._bury_lost(worker)

    async def _bury_lost(self, worker: Worker) -> None:
        worker.state = WorkerState.LOST
        self._roster.publish()
        self._roster.news.set()
        await self._remove(worker)

    async def _pair_and_publish(self, worker: Worker) -> None:
        """Connect the newcomer with every ready worker of the other pool, then show it to routers.

        Raises:
            WorkerDied: a peer that is still there refuses it, or it refuses the peer.
        """
        async with self._pairing:
            await self._pair(worker)
            worker.state = WorkerState.READY
        self._roster.note(EventKind.READY, worker.worker_id, f"{worker.worker_id} is ready")
        self._roster.pools[worker.role].failures = StartFailures()
        await self._roster.save()  # first: the next controller must not take from routers what they use
        self._roster.decide(worker.role)
        self._roster.publish()
        self._roster.news.set()

    async def _pair(self, worker: Worker) -> None:
        async with asyncio.timeout(self._timing.connect_s):
            peers = self._roster.of(DECODE if worker.role == PREFILL else PREFILL, WorkerState.READY)
            if worker.role == PREFILL:
                refusals = await worker.handle.connect([peer.description for peer in peers])
            else:
                replies = await asyncio.gather(*(self._connect(peer, worker) for peer in peers))
                refusals = [refusal for reply in replies for refusal in reply]
        for peer_id, reason in refusals:
            if peer_id == worker.worker_id or self._roster.is_ready(peer_id):
                raise WorkerDied(f"{worker.worker_id} does not fit the other pool: {reason}")

    async def _connect(self, prefill: Worker, decode: Worker) -> list[tuple[str, str]]:
        """One that does not answer goes on connecting by itself when it can, and must not hold up the newcomer."""
        try:
            async with asyncio.timeout(self._timing.answer_s):
                return await prefill.handle.connect([decode.description])
        except (WorkerDied, TimeoutError):
            return []

    def _note_failed_start(self, role: str, worker_id: str, error: Exception) -> None:
        pool = self._roster.pools[role]
        reason = " ".join(str(error).split()) or type(error).__name__
        hopeless = isinstance(error, ConfigError)
        pool.failures = after_failure(pool.failures, reason, self._clock.now(), hopeless=hopeless)
        self._roster.decide(role)
        self._roster.note(EventKind.FAILED, worker_id, f"start of {worker_id} failed: {reason}")

    async def _stop(self, worker: Worker, life: asyncio.Task[None] | None) -> None:
        if life is not None:
            await asyncio.wait({life})
        timing, begun_s = self._timing, asyncio.get_running_loop().time()
        bound_s = timing.stop_s if worker.drain_s is None else worker.drain_s + timing.margin_s
        orderly = await stop_bounded(worker.handle, timing.shutdown_s if self.shutting_down else bound_s, worker.drain_s)
        seconds = f"{asyncio.get_running_loop().time() - begun_s:.1f} s"
        if orderly:
            text = f"{worker.worker_id} has ended in order after {seconds}: {worker.reason}"
            self._roster.note(EventKind.DRAINED, worker.worker_id, text)
        else:
            text = f"{worker.worker_id} did not end in order within {seconds} ({worker.reason}), it is killed"
            self._roster.note(EventKind.LOST, worker.worker_id, text)
        await self._remove(worker)

    async def _remove(self, worker: Worker) -> None:
        """The process ends for certain, then peers are told: they may reuse memory that it could have written."""
        while not await bury(worker.handle, self._timing):
            log.error("the process of %s is not known to be gone: its peers keep what it may still write to", worker.worker_id)
        self._roster.workers.pop(worker.worker_id, None)
        self._roster.publish()
        self._roster.news.set()
        peers = [w for w in self._roster.workers.values() if w.role != worker.role and w.description]
        await asyncio.gather(*(self._disconnect(peer, worker.worker_id) for peer in peers))

    async def _disconnect(self, peer: Worker, worker_id: str) -> None:
        try:
            async with asyncio.timeout(self._timing.answer_s):
                await peer.handle.disconnect(worker_id)
        except (WorkerDied, TimeoutError) as error:
            log.info("%s was not told that %s is gone: %s", peer.worker_id, worker_id, error)
