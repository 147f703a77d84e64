"""How many workers a pool should have, from what its workers report. Pure: samples and the time go in, a decision comes out.

Each signal is told as *pressure*: 1 is its target. A pool grows at once when its pressure is above the target for a few samples
in a row, in proportion and to twice its size at most. It shrinks by one, and only when the pressure that one worker fewer would
have had stayed well below the target for minutes: so what follows a step down is never a step up, unless the load has changed.
A pool that had to grow soon after it shrank is patient for twice as long from then on.

Nothing is decided from numbers that are missing, old, or no numbers at all, nor while workers are starting.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tandem.config import AutoscaleConfig, PoolLimits

__all__ = ["Decision", "DecodeSample", "Memory", "PoolSample", "PrefillSample", "decide"]

_TOLERANCE = 0.1
_CONFIRMED_BY = 3
_CALM = 0.7
_STEP_CALM = 0.95
_IDLE = 0.5
_SOON_S = 900.0
_LONGEST_PATIENCE = 8.0


@dataclass(frozen=True, slots=True)
class PrefillSample:
    """queue_s: how long the prompt that waits longest has waited. queue_tokens: that wait. busy: share of the time since the
    last sample spent in steps. age_s: of the report."""

    worker_id: str
    age_s: float
    queue_s: float
    queue_tokens: float
    busy: float

    def numbers(self) -> tuple[float, ...]:
        return (self.age_s, self.queue_s, self.queue_tokens, self.busy)


@dataclass(frozen=True, slots=True)
class DecodeSample:
    """kv_used, slots_used: shares of the two pools of memory. step_s: of the newest step."""

    worker_id: str
    age_s: float
    kv_used: float
    slots_used: float
    step_s: float

    def numbers(self) -> tuple[float, ...]:
        return (self.age_s, self.kv_used, self.slots_used, self.step_s)


Sample = PrefillSample | DecodeSample


@dataclass(frozen=True, slots=True)
class PoolSample:
    """wanted: the wish; None: all that nodes offer. offered: units of all nodes. workers: the ready ones that answered."""

    role: str
    wanted: int | None
    ready: int
    offered: int
    workers: Sequence[Sample]


@dataclass(frozen=True, slots=True)
class Memory:
    """What of earlier samples matters. num_over: samples above the target in a row. calm_since_s: since when one worker fewer
    would have done. changed_s, grew: the last change. patience: of its waits before it shrinks."""

    num_over: int = 0
    calm_since_s: float | None = None
    changed_s: float = -math.inf
    grew: bool = False
    patience: float = 1.0


@dataclass(frozen=True, slots=True)
class Decision:
    """wanted: None: leave it. reason: one sentence, whatever was decided."""

    wanted: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class _Pressure:
    """now: 1 is the target. with_fewer: what one worker fewer would have, as a share of what is allowed before it shrinks.
    text: the signal that is greatest, against its target."""

    now: float
    with_fewer: float
    text: str


def decide(pool: PoolSample, memory: Memory, config: AutoscaleConfig, now_s: float) -> tuple[Decision, Memory]:
    """The decision for one pool, and what to remember for the next."""
    limits = config.prefill if pool.role == "prefill" else config.decode
    if why := _why_not(pool, config):
        return Decision(None, f"{pool.role} stays as it is: {why}"), replace(memory, num_over=0, calm_since_s=None)
    size = pool.wanted or 0
    most = max(limits.min, min(limits.max, pool.offered))
    if not limits.min <= size <= most:
        bound = limits.min if size < limits.min else most
        return _change(pool, memory, bound, f"it may be from {limits.min} to {most}", now_s)
    pressure = _pressure(pool.workers, config)
    memory = _remember(memory, pressure, now_s)
    if pressure.now > 1 + _TOLERANCE:
        return _grow(pool, memory, limits, most, pressure, now_s)
    return _shrink(pool, memory, limits, pressure, now_s)


def _why_not(pool: PoolSample, config: AutoscaleConfig) -> str:
    """Why nothing may be decided; empty: it may."""
    if not pool.wanted:
        return "its size is set by hand" if pool.wanted == 0 else "it follows what nodes offer"
    if pool.ready < min(pool.wanted, pool.offered):
        return f"{pool.ready} of {pool.wanted} are ready yet"
    if pool.ready > pool.wanted:
        return f"{pool.ready - pool.wanted} are on their way out"
    if len(pool.workers) < pool.ready or not pool.workers:
        return f"{pool.ready - len(pool.workers)} of {pool.ready} workers gave no numbers"
    for worker in pool.workers:
        if not all(math.isfinite(number) and number >= 0 for number in worker.numbers()):
            return f"{worker.worker_id} gave what is no number"
        if worker.age_s > config.stale_s:
            return f"what {worker.worker_id} said is {worker.age_s:.0f} s old"
    return ""


def _remember(memory: Memory, pressure: _Pressure, now_s: float) -> Memory:
    over = memory.num_over + 1 if pressure.now > 1 + _TOLERANCE else 0
    calm = (now_s if memory.calm_since_s is None else memory.calm_since_s) if pressure.with_fewer < 1 else None
    return replace(memory, num_over=over, calm_since_s=calm)


def _grow(
    pool: PoolSample, memory: Memory, limits: PoolLimits, most: int, pressure: _Pressure, now_s: float
) -> tuple[Decision, Memory]:
    size = len(pool.workers)
    if size >= most:
        return Decision(None, f"{pool.role} stays at {size}, the most there may be: {pressure.text}"), memory
    if memory.num_over < _CONFIRMED_BY:
        return Decision(None, f"{pool.role} stays at {size} until that is confirmed: {pressure.text}"), memory
    if memory.grew and now_s - memory.changed_s < limits.up_cooldown_s:
        return Decision(None, f"{pool.role} stays at {size}, it has just grown: {pressure.text}"), memory
    wanted = min(most, 2 * size, max(size + 1, math.ceil(size * min(pressure.now, 2.0))))
    return _change(pool, memory, wanted, pressure.text, now_s)


def _shrink(pool: PoolSample, memory: Memory, limits: PoolLimits, pressure: _Pressure, now_s: float) -> tuple[Decision, Memory]:
    size = len(pool.workers)
    if memory.calm_since_s is None or size <= limits.min:
        return Decision(None, f"{pool.role} stays at {size}: {pressure.text}"), memory
    wait_s = limits.down_after_s * memory.patience
    calm_s = now_s - max(memory.calm_since_s, memory.changed_s)
    if calm_s < wait_s:
        text = f"{pool.role} stays at {size}: one fewer would do for {calm_s:.0f} s now, {wait_s:.0f} s are asked for"
        return Decision(None, text), memory
    return _change(pool, memory, size - 1, f"one fewer would have done for {calm_s:.0f} s, {pressure.text}", now_s)


def _change(pool: PoolSample, memory: Memory, wanted: int, why: str, now_s: float) -> tuple[Decision, Memory]:
    grew = wanted > (pool.wanted or 0)
    regretted = grew and not memory.grew and now_s - memory.changed_s < _SOON_S
    patience = min(_LONGEST_PATIENCE, 2 * memory.patience) if regretted else memory.patience
    return Decision(wanted, f"{pool.role} goes from {pool.wanted} to {wanted}: {why}"), Memory(
        changed_s=now_s, grew=grew, patience=patience
    )


def _pressure(workers: Sequence[Sample], config: AutoscaleConfig) -> _Pressure:
    size = len(workers)
    more = size / (size - 1) if size > 1 else math.inf
    prefill = [worker for worker in workers if isinstance(worker, PrefillSample)]
    decode = [worker for worker in workers if isinstance(worker, DecodeSample)]
    return _of_prefill(prefill, config, more) if prefill else _of_decode(decode, config, more)


def _of_prefill(workers: Sequence[PrefillSample], config: AutoscaleConfig, more: float) -> _Pressure:
    """Prompts that wait at workers that are not busy wait for something else: another prefill worker would not help them."""
    busy = sum(worker.busy for worker in workers) / len(workers)
    waits = busy >= _IDLE
    queue_s = max(worker.queue_s for worker in workers) if waits else 0.0
    backlog = sum(worker.queue_tokens for worker in workers) / len(workers) if waits else 0.0
    signals = (
        (queue_s / config.queue_s, f"the longest wait is {queue_s:.1f} s, the target {config.queue_s:g} s"),
        (
            backlog / config.backlog_tokens,
            f"{backlog:.0f} tokens wait for each worker, the target is {config.backlog_tokens}",
        ),
        (busy / config.busy, f"workers are busy {busy:.0%} of the time, the target is {config.busy:.0%}"),
    )
    now, text = max(signals)
    queues = max(signals[0][0], signals[1][0])
    return _Pressure(now, max(queues / _CALM, busy * more / config.busy / _CALM), text)


def _of_decode(workers: Sequence[DecodeSample], config: AutoscaleConfig, more: float) -> _Pressure:
    """A full state pool is as full as a full KV pool. A step with more sequences takes at most so many times as long, and
    mostly less, since weights are read once for all."""
    used = sum(max(worker.kv_used, worker.slots_used) for worker in workers) / len(workers)
    step_s = max(worker.step_s for worker in workers)
    signals = (
        (used / config.memory_used, f"{used:.0%} of KV or state slots are in use, the target is {config.memory_used:.0%}"),
        (step_s / config.itl_s, f"a step takes {1000 * step_s:.0f} ms, the target is {1000 * config.itl_s:.0f} ms"),
    )
    now, text = max(signals)
    with_fewer = max(used * more / config.memory_used / _CALM, step_s * more / config.itl_s / _STEP_CALM)
    return _Pressure(now, with_fewer, text)
