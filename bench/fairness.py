"""A flood of batch prompts and a trickle of interactive ones: who waits, and what the flood loses.

    python -m bench.fairness [--seconds 60] [--outstanding 128] [--every 1.5]

Three times on the same pair of workers, one core each, through the router: the trickle alone, the flood alone, and both. The
flood keeps so many requests under way all the time, far more than the decode worker has room for; the trickle's requests come
at random, with that distance at the mean. Shown: the queue time of interactive requests, as the final message tells it, and the
prompt tokens of batch requests per second. The goal: with the flood, p95 of the interactive queue time is at most twice that
without it, and the flood keeps more than 80 % of its throughput.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from dataclasses import dataclass, field

from bench.checkpoints import bench_checkpoint
from bench.stats import quantile, summary_ms
from bench.up import UpCluster, up_cluster
from tandem.v1 import inference_pb2 as pb

__all__ = ["Run", "main"]

_VOCAB = 32000
_SETTLE_S = 5.0


@dataclass(slots=True)
class Run:
    """queue_s, ttft_s: of each interactive request. batch_tokens: prompt tokens of batch requests that ended in time."""

    seconds: float
    queue_s: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    batch_tokens: int = 0
    batch_requests: int = 0

    @property
    def batch_rate(self) -> float:
        return self.batch_tokens / self.seconds


def _request(rng: random.Random, tokens: int, answer: int, service_class: pb.ServiceClass) -> pb.GenerateRequest:
    request = pb.GenerateRequest(max_new_tokens=answer, ignore_eos=True, service_class=service_class)
    request.token_ids.ids.extend(rng.randrange(_VOCAB) for _ in range(tokens))
    return request


async def _ask(cluster: UpCluster, request: pb.GenerateRequest) -> pb.RequestTimings:
    timings = None
    async for response in cluster.stub.Generate(request):
        if response.HasField("finished"):
            timings = response.finished.timings
    assert timings is not None
    return timings


async def _flood(cluster: UpCluster, args: argparse.Namespace, run: Run, seed: int) -> None:
    rng = random.Random(seed)
    while True:
        await _ask(cluster, _request(rng, args.batch_prompt, args.answer, pb.SERVICE_CLASS_BATCH))
        run.batch_tokens += args.batch_prompt
        run.batch_requests += 1


async def _trickle(cluster: UpCluster, args: argparse.Namespace, run: Run) -> None:
    rng = random.Random(7)
    async with asyncio.TaskGroup() as asking:
        started_s, at_s = time.monotonic(), 0.0
        while (at_s := at_s + rng.expovariate(1 / args.every)) < run.seconds:
            await asyncio.sleep(max(0.0, started_s + at_s - time.monotonic()))
            request = _request(rng, args.prompt, args.answer, pb.SERVICE_CLASS_INTERACTIVE)
            asking.create_task(_note(cluster, request, run))


async def _note(cluster: UpCluster, request: pb.GenerateRequest, run: Run) -> None:
    timings = await _ask(cluster, request)
    run.queue_s.append(timings.queue)
    run.ttft_s.append(timings.ttft)


async def _measure(cluster: UpCluster, args: argparse.Namespace, *, trickle: bool, flood: bool) -> Run:
    run = Run(args.seconds)
    floods = [asyncio.create_task(_flood(cluster, args, run, 100 + i)) for i in range(args.outstanding if flood else 0)]
    await asyncio.sleep(_SETTLE_S if flood else 0.0)
    run.batch_tokens = run.batch_requests = 0
    started_s = time.monotonic()
    asking = asyncio.create_task(_trickle(cluster, args, run)) if trickle else None
    await asyncio.sleep(run.seconds)
    run.seconds = time.monotonic() - started_s
    done = run.batch_tokens, run.batch_requests
    if asking is not None:
        await asking
    run.batch_tokens, run.batch_requests = done
    for task in floods:
        task.cancel()
    ended = await asyncio.gather(*floods, return_exceptions=True)
    broken = [error for error in ended if isinstance(error, Exception)]
    if broken:
        raise broken[0]
    await cluster.until_whole()
    return run


def _show(name: str, run: Run) -> None:
    print(f"\n{name}")
    if run.queue_s:
        print(f"  {len(run.queue_s)} interactive      {'p50':>9} {'p95':>9} {'p99':>9} {'max':>9}")
        print(f"  queue, ms             {summary_ms(run.queue_s)}")
        print(f"  TTFT, ms              {summary_ms(run.ttft_s)}")
    if run.batch_requests:
        print(f"  batch: {run.batch_requests} requests, {run.batch_rate:.0f} prompt tokens/s")


async def _run(args: argparse.Namespace) -> int:
    settings: dict[str, object] = {
        "worker": {"threads": 1, "cache": {"budget_bytes": 1 << 29, "max_sequences": 16}},
        "router": {"queue_wait_s": 600.0},  # the flood waits longer than anybody who asks would
    }
    async with up_cluster("--model", str(bench_checkpoint()), settings=settings) as cluster:
        await cluster.until_ready()
        for _ in range(3):  # what is slow the first time
            await _ask(cluster, _request(random.Random(0), args.prompt, args.answer, pb.SERVICE_CLASS_INTERACTIVE))
        trickle = await _measure(cluster, args, trickle=True, flood=False)
        _show("the trickle alone", trickle)
        flood = await _measure(cluster, args, trickle=False, flood=True)
        _show("the flood alone", flood)
        both = await _measure(cluster, args, trickle=True, flood=True)
        _show("both", both)
    waits = quantile(both.queue_s, 0.95) / quantile(trickle.queue_s, 0.95)
    keeps = both.batch_rate / flood.batch_rate
    print(f"\ninteractive p95 queue time: {waits:.2f} x that without the flood; goal 2: {'met' if waits <= 2 else 'missed'}")
    print(f"batch throughput: {keeps:.0%} of its own alone; goal 80 %: {'met' if keeps > 0.8 else 'missed'}")
    return 0 if waits <= 2 and keeps > 0.8 else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--outstanding", type=int, default=128, help="batch requests under way")
    parser.add_argument("--every", type=float, default=3.0, help="mean seconds between interactive requests")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of an interactive prompt")
    parser.add_argument("--batch-prompt", type=int, default=512)
    parser.add_argument("--answer", type=int, default=8)
    return asyncio.run(_run(parser.parse_args()))


if __name__ == "__main__":
    raise SystemExit(main())
