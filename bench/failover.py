"""What the loss of a decode worker costs the streams on it: how long they stand still, and of what that is made.

    python -m bench.failover [--runs 5] [--streams 4] [--json FILE]

A cluster of `tandem up` with two decode workers. In each run streams go on until each has a few dozen tokens; then the worker
that serves most of them is killed (SIGKILL), or frozen (SIGSTOP). Per stream that stood on it:

- stall: the gap between the last token before and the first after, as the client sees it;
- detection: from the fault until the router gave the worker up, from its log;
- the rest: placing it again, prefill of prompt and delivered tokens, hand-off and the next step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime

from bench.up import UpCluster, up_cluster
from tandem.v1 import inference_pb2 as pb

__all__ = ["Stall", "lose_decode_worker", "main"]

_FAULTS = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}
_PROMPT_TOKENS = 200
_ANSWER_TOKENS = 600
_WARM_TOKENS = 60


@dataclass(frozen=True, slots=True)
class Stall:
    """Seconds; see the module."""

    fault: str
    stall_s: float
    detection_s: float
    rest_s: float


@dataclass(slots=True)
class _Stream:
    """When tokens came, on the wall clock, and how it ended."""

    moments: list[float]
    attempts: int = 0

    def gap_at(self, moment_s: float) -> float:
        """Between the last token before the moment, or just after, and the next: the longest gap that ends after it."""
        pairs = zip(self.moments, self.moments[1:], strict=False)
        return max((b - a for a, b in pairs if b > moment_s), default=0.0)


async def lose_decode_worker(cluster: UpCluster, fault: str, num_streams: int) -> list[Stall]:
    """One run. The cluster is whole before and after."""
    await cluster.until_whole()
    streams = [_Stream([]) for _ in range(num_streams)]
    running = [asyncio.create_task(_follow(cluster, stream, number)) for number, stream in enumerate(streams)]
    while min(len(stream.moments) for stream in streams) < _WARM_TOKENS:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    victim = max(await cluster.workers("decode"), key=lambda worker: worker.running)
    begin_s = time.time()
    os.kill(victim.pid, _FAULTS[fault])
    await asyncio.gather(*running)
    detection_s = _given_up_s(cluster.log, victim.id) - begin_s
    gaps = [stream.gap_at(begin_s) for stream in streams if stream.attempts > 1]
    return [Stall(fault, gap, detection_s, gap - detection_s) for gap in gaps]


async def _follow(cluster: UpCluster, stream: _Stream, number: int) -> None:
    message = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[(number * 31 + i) % 256 for i in range(_PROMPT_TOKENS)]),
        max_new_tokens=_ANSWER_TOKENS,
        ignore_eos=True,
    )
    async for response in cluster.stub.Generate(message):
        if response.token_ids:
            stream.moments.append(time.time())
        if response.HasField("finished"):
            stream.attempts = response.finished.attempts


def _given_up_s(log: str, worker_id: str) -> float:
    """When the router gave a worker up, from its log."""
    found = re.search(rf"^(\S+ \S+) WARNING router\.handles: worker {worker_id} is lost", log, re.MULTILINE)
    if found is None:
        raise LookupError(f"the router's log does not say that {worker_id} is lost")
    return datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S,%f").timestamp()


async def _measure(num_runs: int, num_streams: int) -> list[Stall]:
    stalls: list[Stall] = []
    async with up_cluster("--memory-gib", "0.3", prefill=1, decode=2) as cluster:
        for number in range(num_runs):
            for fault in _FAULTS:
                run = await lose_decode_worker(cluster, fault, num_streams)
                stalls += run
                print(f"run {number + 1}, {fault}: " + ", ".join(f"{s.stall_s:.2f} s" for s in run), flush=True)
    return stalls


def _row(name: str, values: Sequence[float]) -> str:
    return f"{name:<28}{statistics.median(values):>9.3f}{min(values):>9.3f}{max(values):>9.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    stalls = asyncio.run(_measure(args.runs, args.streams))
    print(f"\n{'seconds':<28}{'median':>9}{'min':>9}{'max':>9}")
    for fault in _FAULTS:
        mine = [stall for stall in stalls if stall.fault == fault]
        if mine:
            print(_row(f"{fault} stall ({len(mine)} streams)", [s.stall_s for s in mine]))
            print(_row("  until it was noticed", [s.detection_s for s in mine]))
            print(_row("  prefill and hand-off again", [s.rest_s for s in mine]))
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump([asdict(stall) for stall in stalls], file, indent=1)


if __name__ == "__main__":
    main()
