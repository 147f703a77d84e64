"""Three days of load, simulated, next to pools of fixed sizes: what the autoscaler holds, costs, and how often it turns round.

    python -m bench.autoscale [--seed 1] [--json FILE]

The policy is the real one (`controller.autoscale`); the pools are flows of tokens: a prefill worker absorbs so many tokens a
second; a decode worker's step takes longer with each sequence in it, and its state slots and KV blocks are bounded. A worker
takes a minute and a half to start and is paid until it has drained. Days:

- daily: a curve with one peak, in Poisson noise;
- burst: a quiet day with five times the load for ten minutes, every three hours;
- drift: the same number of requests, prompts grow from 500 to 8,000 tokens.

A request is in time when its first token comes within 2 s of its arrival and its tokens 50 ms apart. Fixed sizes: what the mean
of the day needs, and what its peak needs.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

from controller.autoscale import DecodeSample, Memory, PoolSample, PrefillSample, decide
from tandem.config import AutoscaleConfig, PoolLimits

__all__ = ["DAYS", "Day", "Outcome", "main", "simulate"]

_DAY_S = 86_400.0
_STEP_S = 5.0
_START_S = 90.0
_DRAIN_S = 60.0
_TTFT_S = 2.0
_ITL_S = 0.05
_PREFILL_TOKENS_PER_S = 8_000.0
_STEP_BASE_S, _STEP_PER_SEQUENCE_S = 0.018, 0.0006
_SLOTS = 64
_KV_TOKENS = 400_000
_ANSWER_TOKENS = 250
_SOON_S = 1800.0
_MOST = 32

CONFIG = AutoscaleConfig(enabled=True, prefill=PoolLimits(max=_MOST), decode=PoolLimits(max=_MOST))


@dataclass(frozen=True, slots=True)
class Day:
    """rate: requests per second, prompt_tokens: their mean length, both at a second of the day."""

    name: str
    rate: Callable[[float], float]
    prompt_tokens: Callable[[float], float]


def _burst(t: float) -> float:
    return 10.0 if t % 10_800 > 10_200 else 2.0


DAYS = (
    Day("daily", lambda t: 6.0 - 5.0 * math.cos(2 * math.pi * t / _DAY_S), lambda t: 1500.0),
    Day("burst", _burst, lambda t: 1500.0),
    Day("drift", lambda t: 4.0, lambda t: 500.0 + 7500.0 * t / _DAY_S),
)


@dataclass(slots=True)
class Outcome:
    """in_time: share of requests. worker_hours: of both pools. changes: of either pool's size. turns: changes in the other
    direction than the one before; reversals: those of them that let a pool grow within half an hour of having shrunk."""

    day: str
    sizes: str
    in_time: float = 0.0
    worker_hours: float = 0.0
    changes: int = 0
    turns: int = 0
    reversals: int = 0
    largest: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Pool:
    """ready: workers that serve. starting, leaving: when each will be ready, or gone."""

    role: str
    ready: int
    memory: Memory = field(default_factory=Memory)
    starting: list[float] = field(default_factory=list)
    leaving: list[float] = field(default_factory=list)
    changes: list[tuple[float, int]] = field(default_factory=list)

    @property
    def wanted(self) -> int:
        return self.ready + len(self.starting)

    @property
    def paid(self) -> int:
        return self.ready + len(self.starting) + len(self.leaving)

    def advance(self, t: float) -> None:
        self.ready += sum(when <= t for when in self.starting)
        self.starting = [when for when in self.starting if when > t]
        self.leaving = [when for when in self.leaving if when > t]

    def resize(self, wanted: int, t: float) -> None:
        change = wanted - self.wanted
        self.changes.append((t, change))
        if change > 0:
            self.starting += [t + _START_S] * change
        else:
            self.ready += change
            self.leaving += [t + _DRAIN_S] * -change

    def turns(self) -> int:
        return sum(a[1] * b[1] < 0 for a, b in self._pairs())

    def reversals(self) -> int:
        return sum(a[1] < 0 < b[1] and b[0] - a[0] < _SOON_S for a, b in self._pairs())

    def _pairs(self) -> list[tuple[tuple[float, int], tuple[float, int]]]:
        return list(zip(self.changes, self.changes[1:], strict=False))


@dataclass(slots=True)
class _Flow:
    """backlog: prompt tokens that wait. running: sequences that decode; waiting: for room to."""

    backlog: float = 0.0
    running: float = 0.0
    waiting: float = 0.0
    busy: float = 0.0
    queue_s: float = 0.0
    step_s: float = _STEP_BASE_S
    kv_used: float = 0.0
    slots_used: float = 0.0

    def advance(self, arrivals: int, prompt_tokens: float, prefill: int, decode: int) -> None:
        rate = prefill * _PREFILL_TOKENS_PER_S
        self.backlog += arrivals * prompt_tokens
        done = min(self.backlog, rate * _STEP_S)
        self.backlog -= done
        self.busy, self.queue_s = done / (rate * _STEP_S), self.backlog / rate
        tokens = prompt_tokens + _ANSWER_TOKENS
        room = decode * min(_SLOTS, _KV_TOKENS / tokens)
        self.waiting += done / prompt_tokens
        joining = min(self.waiting, max(0.0, room - self.running))
        self.waiting -= joining
        self.running += joining
        self.step_s = _STEP_BASE_S + _STEP_PER_SEQUENCE_S * self.running / decode
        self.running -= min(self.running, self.running * _STEP_S / (self.step_s * _ANSWER_TOKENS))
        self.slots_used = min(1.0, self.running / decode / _SLOTS)
        self.kv_used = min(1.0, self.running / decode * tokens / _KV_TOKENS)

    def in_time(self, prompt_tokens: float, prefill: int) -> bool:
        wait_s = self.waiting / max(1e-9, self.running / (self.step_s * _ANSWER_TOKENS)) if self.waiting > 0.5 else 0.0
        ttft_s = self.queue_s + prompt_tokens / _PREFILL_TOKENS_PER_S + wait_s
        return ttft_s <= _TTFT_S and self.step_s <= _ITL_S

    def samples(self, pool: _Pool) -> PoolSample:
        ids = [f"{pool.role}-{number}" for number in range(pool.ready)]
        tokens = self.backlog / max(1, pool.ready)
        prefill = [PrefillSample(name, 1.0, self.queue_s, tokens, self.busy) for name in ids]
        decode = [DecodeSample(name, 1.0, self.kv_used, self.slots_used, self.step_s) for name in ids]
        return PoolSample(pool.role, pool.wanted, pool.ready, _MOST, prefill if pool.role == "prefill" else decode)


def simulate(day: Day, sizes: tuple[int, int], config: AutoscaleConfig | None, seed: int) -> Outcome:
    """sizes: prefill and decode workers at midnight. config: None: they stay."""
    chance = random.Random(seed)
    pools = (_Pool("prefill", sizes[0]), _Pool("decode", sizes[1]))
    flow, outcome = _Flow(), Outcome(day.name, "autoscaled" if config else f"fixed {sizes[0]}+{sizes[1]}")
    requests = in_time = 0
    outcome.largest = {pool.role: pool.ready for pool in pools}
    for number in range(int(_DAY_S / _STEP_S)):
        t = number * _STEP_S
        for pool in pools:
            pool.advance(t)
            outcome.largest[pool.role] = max(outcome.largest[pool.role], pool.wanted)
            outcome.worker_hours += pool.paid * _STEP_S / 3600
        arrivals = _poisson(chance, day.rate(t) * _STEP_S)
        flow.advance(arrivals, day.prompt_tokens(t), pools[0].ready, pools[1].ready)
        requests += arrivals
        in_time += arrivals * flow.in_time(day.prompt_tokens(t), pools[0].ready)
        for pool in pools if config else ():
            assert config is not None
            decision, pool.memory = decide(flow.samples(pool), pool.memory, config, t)
            if decision.wanted is not None:
                pool.resize(decision.wanted, t)
    outcome.in_time = in_time / max(1, requests)
    outcome.changes = sum(len(pool.changes) for pool in pools)
    outcome.turns = sum(pool.turns() for pool in pools)
    outcome.reversals = sum(pool.reversals() for pool in pools)
    return outcome


def fixed_sizes(day: Day, share: Callable[[Sequence[float]], float]) -> tuple[int, int]:
    """Workers that hold the targets at this share of the day's load (its mean, its peak)."""
    moments = [number * 60.0 for number in range(int(_DAY_S / 60))]
    prefill = share([day.rate(t) * day.prompt_tokens(t) for t in moments]) / (_PREFILL_TOKENS_PER_S * CONFIG.busy)
    per_worker = [min(_SLOTS, _KV_TOKENS / (day.prompt_tokens(t) + _ANSWER_TOKENS)) * CONFIG.memory_used for t in moments]
    fit = [min(each, (CONFIG.itl_s - _STEP_BASE_S) / _STEP_PER_SEQUENCE_S) for each in per_worker]
    needs = [
        day.rate(t) * (_STEP_BASE_S + _STEP_PER_SEQUENCE_S * most) * _ANSWER_TOKENS / most
        for t, most in zip(moments, fit, strict=True)
    ]
    return max(1, math.ceil(prefill)), max(1, math.ceil(share(needs)))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _poisson(chance: random.Random, mean: float) -> int:
    """By Knuth's product of uniforms: means here are below 60."""
    limit, count, product = math.exp(-mean), 0, chance.random()
    while product > limit:
        count += 1
        product *= chance.random()
    return count


def run(seed: int) -> list[Outcome]:
    outcomes = []
    for day in DAYS:
        outcomes.append(simulate(day, (2, 2), CONFIG, seed))
        outcomes += [simulate(day, fixed_sizes(day, share), None, seed) for share in (_mean, max)]
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    outcomes = run(args.seed)
    print(f"{'day':<8}{'sizes':<14}{'in time':>9}{'worker-hours':>14}{'changes':>9}{'turns':>7}{'reversals':>11}  largest")
    for o in outcomes:
        largest = "+".join(str(size) for size in o.largest.values())
        row = f"{o.day:<8}{o.sizes:<14}{o.in_time:>9.2%}{o.worker_hours:>14.1f}{o.changes:>9}{o.turns:>7}{o.reversals:>11}"
        print(f"{row}  {largest}")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump([asdict(outcome) for outcome in outcomes], file, indent=1)


if __name__ == "__main__":
    main()
