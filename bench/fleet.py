"""A fleet on virtual time: the router's queue and placement, the workers' schedulers and prefix caches, and no computation.

    python -m bench.fleet [--requests 100000] [--prefill 64] [--decode 64] [--load 0.8] [--seed 1]

Only what a step costs is made up (`bench.fleet_workers.Costs`); who computes what, where and when is decided by the code that
serves. Requests come at random at a rate that keeps the prefill pool busy to the share `--load` if nothing is found in caches;
lengths have long tails, three of four prompts begin with one of many shared prefixes, some of which are far more popular than
others, and a fifth of the requests are of class batch. A seed repeats a run to the last digit: the digest at the end is of
every moment of every request.

Goodput: requests that had their first token within 2 s and then a token every 50 ms at the mean. Imbalance: the busiest
worker's time over the mean. Decision: one look of the queue, from the choice of the class to the workers chosen, with a
snapshot of all workers. Naming: the hashes of a prompt's blocks, once for each request before it queues. Both in
processor time.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from bench.fleet_decode import DecodeSim
from bench.fleet_requests import Ask, Fleet, requests
from bench.fleet_workers import Journey, PrefillSim
from bench.stats import quantile
from bench.virtual_time import VirtualTimeLoop
from prefill_worker.prompt import PrefillTask
from router.admission import PlacementQueue
from router.model import ModelInfo
from router.placement import Need
from router.prefixes import PrefixEntry
from router.state import WorkerTable
from tandem.cache.names import Prefix
from tandem.errors import Overloaded
from tandem.request import Request, SamplingParams, ServiceClass, StopRules

__all__ = ["Fleet", "Report", "main", "requests", "simulate"]

_VOCAB = 150_000
_TTFT_S = 2.0
_TOKEN_S = 0.05


@dataclass(slots=True)
class Report:
    """Shares are of all requests or tokens; seconds are virtual, but for decision_us and naming_us, which are this
    machine's."""

    requests: int
    refused: int
    virtual_s: float
    good_share: float = 0.0
    goodput_per_s: float = 0.0
    ttft_s: dict[str, list[float]] = field(default_factory=dict)
    token_s: list[float] = field(default_factory=list)
    hit_rate: float = 0.0
    held_rate: float = 0.0
    prefill_busy: float = 0.0
    prefill_imbalance: float = 0.0
    decode_busy: float = 0.0
    decode_batch: float = 0.0
    decode_imbalance: float = 0.0
    decisions: int = 0
    decision_us: list[float] = field(default_factory=list)
    naming_us: list[float] = field(default_factory=list)
    digest: str = ""


class _TimedQueue(PlacementQueue):
    """seconds: processor time of each decision."""

    seconds: list[float]
    _num_settled = 0

    def _look(self) -> bool:
        before, started_s = self._num_settled, time.thread_time()
        goes_on = super()._look()
        if self._num_settled > before:  # somebody waited
            self.seconds.append(time.thread_time() - started_s)
        return goes_on

    def _settle(self, head: Any) -> bool:
        self._num_settled += 1
        return super()._settle(head)


class _Run:
    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.loop = asyncio.get_running_loop()
        self.model = ModelInfo("fleet", "fleet", 1 << 20, fleet.sizes.block_tokens, _VOCAB)
        self.table = WorkerTable()
        shared = (self.table, self.model, fleet.sizes, fleet.costs)
        self.prefill = {f"p{n}": PrefillSim(n, *shared, fleet.prefill) for n in range(fleet.num_prefill)}
        self.decode = {f"d{n}": DecodeSim(n, *shared, fleet.decode) for n in range(fleet.num_decode)}
        for worker in (*self.prefill.values(), *self.decode.values()):
            self.table.add(cast(Any, worker.handle))
        self.queue = _TimedQueue(self.table, max_waiting=fleet.num_requests, wait_s=1e6)
        self.queue.seconds = []
        self.naming_s: list[float] = []
        self.journeys: list[Journey] = []
        self.refused = 0

    async def all(self) -> None:
        async with asyncio.TaskGroup() as asking:
            at_s = self.loop.time()
            for number, ask in enumerate(requests(self.fleet)):
                at_s += ask.wait_s
                await asyncio.sleep(at_s - self.loop.time())
                asking.create_task(self._serve(number, ask))

    async def _serve(self, number: int, ask: Ask) -> None:
        request = Request(f"r{number}", ask.prompt, SamplingParams(), StopRules(ask.answer_tokens), ask.service_class)
        now, key = self.loop.time(), (request.request_id, 1)
        try:
            ticket = self.queue.admit(ask.service_class, len(ask.prompt))
        except Overloaded:
            self.refused += 1
            return
        prefix = self._named(ask.prompt)
        need = Need(request.request_id, request.max_total_tokens, prefix, ask.service_class)
        placed = await self.queue.place(ticket, key, need, len(ask.prompt))
        task = PrefillTask(request, 1, "router", placed.decode_id, now)
        journey = Journey(task, ask.answer_tokens, now)
        journey.held_tokens = self.table.prefixes.hits(prefix).get(placed.decode_id, 0)
        if prefix.names:
            journey.end = PrefixEntry(prefix.shorts[-1], len(prefix.names) * prefix.block_size_tokens)
        finished = asyncio.Event()
        journey.on_first_token, journey.on_finished = lambda: self.table.prefill_done(key), finished.set
        self.prefill[placed.prefill_id].submit(journey, self.decode[placed.decode_id])
        await finished.wait()
        self.table.release(key)
        journey.task = _without_tokens(task)
        self.journeys.append(journey)

    def _named(self, prompt: tuple[int, ...]) -> Prefix:
        started_s = time.thread_time()
        prefix = Prefix.of("fleet", self.fleet.sizes.block_tokens, prompt)
        _ = prefix.shorts
        self.naming_s.append(time.thread_time() - started_s)
        return prefix

    def report(self) -> Report:
        journeys, end_s = self.journeys, self.loop.time()
        report = Report(self.fleet.num_requests, self.refused, end_s)
        good = [journey for journey in journeys if _is_good(journey)]
        report.good_share, report.goodput_per_s = len(good) / self.fleet.num_requests, len(good) / end_s
        for service_class in ServiceClass:
            waits = [j.first_token_s - j.arrived_s for j in journeys if j.task.request.service_class is service_class]
            report.ttft_s[service_class.value] = _quantiles(waits)
        report.token_s = _quantiles([_per_token_s(j) for j in journeys if j.answer_tokens > 1])
        computed = sum(worker.num_tokens for worker in self.prefill.values())
        cached = sum(journey.cached_tokens for journey in journeys)
        report.hit_rate = cached / (cached + computed)
        report.held_rate = sum(journey.held_tokens for journey in journeys) / (cached + computed)
        report.prefill_busy, report.prefill_imbalance = _spread([w.busy_s for w in self.prefill.values()], end_s)
        report.decode_busy, _ = _spread([w.busy_s for w in self.decode.values()], end_s)
        report.decode_batch, report.decode_imbalance = _spread([w.sequence_s for w in self.decode.values()], end_s)
        report.decisions, report.decision_us = len(self.queue.seconds), [s * 1e6 for s in _quantiles(self.queue.seconds)]
        report.naming_us = [s * 1e6 for s in _quantiles(self.naming_s)]
        report.digest = _digest(journeys)
        return report


def simulate(fleet: Fleet) -> Report:
    # The collector would walk through everything that ever happened, in the middle of a decision.
    gc.disable()
    try:
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            return runner.run(_simulate(fleet))
    finally:
        gc.enable()


async def _simulate(fleet: Fleet) -> Report:
    run = _Run(fleet)
    await run.all()
    return run.report()


def _without_tokens(task: PrefillTask) -> PrefillTask:
    """A hundred million tokens need not be kept until the end."""
    request = Request(
        task.request.request_id, task.request.prompt[:1], task.request.sampling, task.request.stop, task.request.service_class
    )
    return PrefillTask(request, 1, "router", task.decode_worker_id, task.received_s)


def _per_token_s(journey: Journey) -> float:
    return (journey.finished_s - journey.first_token_s) / (journey.answer_tokens - 1)


def _is_good(journey: Journey) -> bool:
    steady = journey.answer_tokens == 1 or _per_token_s(journey) <= _TOKEN_S
    return steady and journey.first_token_s - journey.arrived_s <= _TTFT_S


def _quantiles(values: Sequence[float]) -> list[float]:
    """p50, p95, p99, the greatest."""
    return [quantile(values, share) for share in (0.5, 0.95, 0.99, 1.0)]


def _spread(each: Sequence[float], end_s: float) -> tuple[float, float]:
    """Mean share of the time, and the greatest over the mean."""
    mean = sum(each) / len(each)
    return mean / end_s, max(each) / mean


def _digest(journeys: Sequence[Journey]) -> str:
    hashed = hashlib.blake2b(digest_size=8)
    for journey in sorted(journeys, key=lambda journey: journey.task.request.request_id):
        moments = journey.arrived_s, journey.first_token_s, journey.finished_s
        hashed.update(f"{journey.task.request.request_id} {moments} {journey.cached_tokens}\n".encode())
    return hashed.hexdigest()


def _show(report: Report) -> None:
    def ms(values: Sequence[float]) -> str:
        return " ".join(f"{value * 1e3:9.1f}" for value in values)

    print(f"{report.requests} requests in {report.virtual_s:.0f} virtual seconds, {report.refused} refused")
    print(f"goodput {report.goodput_per_s:.1f}/s, {report.good_share:.2%} of all")
    print(f"{'':24}{'p50':>9} {'p95':>9} {'p99':>9} {'max':>9}")
    for name, values in report.ttft_s.items():
        print(f"  {f'TTFT {name}, ms':22}{ms(values)}")
    print(f"  {'per token, ms':22}{ms(report.token_s)}")
    print(f"hit rate {report.hit_rate:.1%} of prompt tokens; {report.held_rate:.1%} held by the decode worker")
    print(f"prefill: busy {report.prefill_busy:.1%}, busiest {report.prefill_imbalance:.2f} x the mean")
    print(f"decode: busy {report.decode_busy:.1%}, {report.decode_batch:.1f} sequences at the mean of all time")
    print(f"        the worker with most has {report.decode_imbalance:.2f} x the mean")
    for name, values in ((f"{report.decisions} decisions, us", report.decision_us), ("naming, us", report.naming_us)):
        print(f"  {name:22}" + " ".join(f"{value:9.0f}" for value in values))
    print(f"digest {report.digest}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--prefill", type=int, default=64)
    parser.add_argument("--decode", type=int, default=64)
    parser.add_argument("--load", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the report there")
    args = parser.parse_args()
    report = simulate(Fleet(args.prefill, args.decode, args.requests, args.load, args.seed))
    _show(report)
    if args.json:
        args.json.write_text(json.dumps(asdict(report)))
    return 0 if report.decision_us[2] < 1000 and not report.refused else 1


if __name__ == "__main__":
    raise SystemExit(main())
