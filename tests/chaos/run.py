"""One run: a cluster, a load, faults, and what is true at the end."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench.up import UpCluster, up_cluster
from tandem.worker_process import find_process
from tests.chaos.cases import Case, make_cases
from tests.chaos.faults import FaultKind, Injector
from tests.chaos.load import BOUNDED, Load, Record

__all__ = ["Plan", "Result", "run", "table"]

_RECOVERY_S = 120.0
_MEMORY_GIB = "0.3"


@dataclass(frozen=True, slots=True)
class Plan:
    """spare: workers of a pool that are left alone at any moment."""

    seconds: float
    seed: int
    num_streams: int = 16
    prefill: int = 2
    decode: int = 2
    spare: int = 1
    num_cases: int = 32


@dataclass(slots=True)
class Result:
    """problems: what must not be, in words. recovery_s: from the end of the load until all was whole. log: `up` and router."""

    seconds: float
    injected: Counter[tuple[FaultKind, str]]
    records: Sequence[Record]
    failures: Counter[str]
    recovery_s: float = 0.0
    problems: list[str] = field(default_factory=list)
    log: str = ""


async def run(plan: Plan, say: Callable[[str], None] = lambda text: None) -> Result:
    cases = await asyncio.to_thread(make_cases, plan.num_cases, plan.seed)
    say(f"{len(cases)} cases, {sum(len(case.expected) for case in cases)} tokens computed in one process")
    async with up_cluster("--memory-gib", _MEMORY_GIB, prefill=plan.prefill, decode=plan.decode) as cluster:
        await cluster.until_ready()
        say(f"cluster at {cluster.address}, {plan.num_streams} streams, {plan.seconds:g} s, seed {plan.seed}")
        result = await _harm(cluster, cases, plan, say)
        result.log = cluster.log
    return result


async def _harm(cluster: UpCluster, cases: Sequence[Case], plan: Plan, say: Callable[[str], None]) -> Result:
    load = Load(cluster.stub, cases, plan.num_streams)
    injector = Injector(plan.seed, plan.spare)
    started_s = time.monotonic()
    while (left_s := started_s + plan.seconds - time.monotonic()) > 0:
        await asyncio.sleep(min(left_s, injector.next_pause_s()))
        if fault := injector.strike(await cluster.workers()):
            say(f"{time.monotonic() - started_s:6.1f} s  {fault.worker_id} {fault.kind.value} {fault.lasts_s or ''}")
    await injector.finish()
    await load.stop()
    result = Result(time.monotonic() - started_s, injector.injected, load.records, load.failures)
    result.problems = _problems(load.records)
    ended_s = time.monotonic()
    try:
        await cluster.until_whole(_RECOVERY_S)
    except TimeoutError as error:
        result.problems.append(f"not whole after {_RECOVERY_S:g} s: {error}")
    result.recovery_s = time.monotonic() - ended_s
    result.problems += [f"process {pid} is still frozen" for pid in injector.frozen_pids if find_process(pid) is not None]
    return result


def _problems(records: Sequence[Record]) -> list[str]:
    wrong = [f"{r.case.request.request_id}, {r.attempts} attempts: {r.wrong}" for r in records if r.wrong]
    failed = [(r.case.request.request_id, r.status, r.reason) for r in records if r.status is not None]
    return wrong + [f"{name}: {status.name} {reason}" for name, status, reason in failed if status not in BOUNDED]


def table(result: Result) -> str:
    records = result.records
    answered = [record for record in records if record.status is None]
    stalls = sorted(record.longest_gap_s for record in answered if record.resumed)
    undisturbed = sorted(record.longest_gap_s for record in answered if not record.resumed)
    rows = [("faults", str(result.injected.total()))]
    rows += [(f"  {role} {kind.value}", str(n)) for (kind, role), n in sorted(result.injected.items(), key=_by_name)]
    rows += [
        ("requests", str(len(records))),
        ("  tokens", str(sum(record.num_tokens for record in records))),
        ("  answered right", str(sum(not record.wrong for record in answered))),
        ("  of them placed again", str(sum(record.resumed for record in answered))),
        ("  wrong", str(sum(bool(record.wrong) for record in records))),
        ("  failed", str(result.failures.total())),
    ]
    rows += [(f"    {reason}", str(count)) for reason, count in sorted(result.failures.items())]
    rows += [
        ("longest gap between tokens", _longest_gap(records)),
        ("  of requests placed again, p50 / p99", f"{_seconds(_at(stalls, 0.5))} / {_seconds(_at(stalls, 0.99))}"),
        ("  of all others, p50 / p99", f"{_seconds(_at(undisturbed, 0.5))} / {_seconds(_at(undisturbed, 0.99))}"),
        ("longest wait for a first token", _seconds(max((r.first_token_s for r in records), default=0.0))),
        ("whole again after", _seconds(result.recovery_s)),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows)


def _longest_gap(records: Sequence[Record]) -> str:
    worst = max(records, key=lambda record: record.longest_gap_s)
    return f"{_seconds(worst.longest_gap_s)} (request {worst.request_id}, {worst.attempts} attempts)"


def _by_name(item: tuple[tuple[FaultKind, str], int]) -> tuple[str, str]:
    (kind, role), _ = item
    return role, kind.value


def _at(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def _seconds(value: float) -> str:
    return f"{value:.2f} s"
