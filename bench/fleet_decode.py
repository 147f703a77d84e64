"""A decode worker of the simulated fleet: the real rule of joining, memory by leases, and no computation."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from bench.fleet_workers import TELL_S, Costs, FakeHandle, Journey, Sizes
from decode_worker.scheduler import num_joins
from router.handles import load_of
from router.model import ModelInfo
from router.prefixes import PrefixEntry
from router.state import WorkerTable
from router.worker import DECODE
from tandem.config import DecodeConfig
from tandem.v1 import worker_pb2 as pb

__all__ = ["DecodeSim"]

_MOST_KEPT = 256


@dataclass(slots=True)
class _Running:
    journey: Journey
    num_blocks: int
    remaining: int


class DecodeSim:
    """Memory as leases hold it: the whole answer from the start. Steps between two changes of the batch are taken at once."""

    def __init__(self, number: int, table: WorkerTable, model: ModelInfo, sizes: Sizes, costs: Costs, config: DecodeConfig):
        self.handle = FakeHandle(f"d{number}", DECODE, model, sizes, sizes.slots)
        self.num_tokens = 0
        self.busy_s = 0.0
        self.sequence_s = 0.0
        self._loop = asyncio.get_running_loop()
        self._table, self._sizes, self._costs, self._config = table, sizes, costs, config
        self._used_blocks = 0
        self._used_slots = 0
        self._asking: deque[tuple[int, Callable[[], None]]] = deque()
        self._joining: deque[_Running] = deque()
        self._running: list[_Running] = []
        self._burst: tuple[float, float, int] | None = None  # began, seconds of a step, steps
        self._timer: asyncio.TimerHandle | None = None
        self._kept: dict[PrefixEntry, None] = {}
        self._published: tuple[PrefixEntry, ...] = ()

    def reserve(self, num_blocks: int, granted: Callable[[], None]) -> None:
        self._asking.append((num_blocks, granted))
        self._grant()

    def join(self, journey: Journey, num_blocks: int) -> None:
        """Its hand-off was verified. What is kept is never short of blocks here: only the number of prompts is bounded."""
        if journey.end is not None:
            self._kept.pop(journey.end, None)
            self._kept[journey.end] = None
            if len(self._kept) > _MOST_KEPT:
                del self._kept[next(iter(self._kept))]
            self._published = tuple(self._kept)
            self._report()
        self._joining.append(_Running(journey, num_blocks, journey.answer_tokens - 1))
        self._interrupt()

    def release(self, num_blocks: int) -> None:
        self._used_blocks -= num_blocks
        self._used_slots -= 1
        self._grant()
        self._report()

    def _grant(self) -> None:
        while self._asking and self._used_slots < self._sizes.slots:
            num_blocks, granted = self._asking[0]
            if self._used_blocks + num_blocks > self._sizes.blocks:
                break
            self._asking.popleft()
            self._used_blocks += num_blocks
            self._used_slots += 1
            self._loop.call_later(TELL_S, granted)
        self._report()

    def _interrupt(self) -> None:
        """End the burst at the end of the step that runs now, for somebody wants to join."""
        if self._burst is None:
            self._begin_burst()
            return
        began_s, step_s, num_steps = self._burst
        done = min(num_steps, int((self._loop.time() - began_s) / step_s) + 1)
        if done < num_steps and self._timer is not None:
            self._timer.cancel()
            self._burst = (began_s, step_s, done)
            self._timer = self._loop.call_at(began_s + done * step_s, self._end_burst)

    def _begin_burst(self) -> None:
        count = num_joins(len(self._joining), len(self._running), 0, self._config.max_batch, self._config.max_joins_per_step)
        self._running += [self._joining.popleft() for _ in range(count)]
        if not self._running:
            self._burst = None
            return
        context = sum(each.journey.context_tokens for each in self._running)
        step_s = self._costs.decode_s(len(self._running), context)
        num_steps = 1 if self._joining else min(each.remaining for each in self._running)
        now = self._loop.time()
        self._burst = (now, step_s, num_steps)
        self._timer = self._loop.call_at(now + num_steps * step_s, self._end_burst)

    def _end_burst(self) -> None:
        assert self._burst is not None
        _, step_s, num_steps = self._burst
        self.busy_s += step_s * num_steps
        self.sequence_s += step_s * num_steps * len(self._running)
        self.num_tokens += num_steps * len(self._running)
        still: list[_Running] = []
        for each in self._running:
            each.remaining -= num_steps
            if each.remaining > 0:
                still.append(each)
                continue
            each.journey.finished_s = self._loop.time()
            self.release(each.num_blocks)
            each.journey.on_finished()
        self._running = still
        self._begin_burst()

    def _report(self) -> None:
        load = pb.WorkerLoad(
            running=len(self._running),
            kv_blocks_used=self._used_blocks,
            kv_blocks_total=self._sizes.blocks,
            state_slots_used=self._used_slots,
            state_slots_total=self._sizes.slots,
            batch_share=self._config.batch_share,
        )
        self.handle.load = replace(load_of(load), prefixes=self._published)
        self._table.changed(self.handle.info.id)
