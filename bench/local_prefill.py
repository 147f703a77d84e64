"""Short prompts shipped, and computed on the decode worker: what either takes, and what it does to running streams.

    python -m bench.local_prefill [--tokens 1 16 32 64] [--repeat 8] [--share 0.25]
    python -m bench.local_prefill --choice

A prefill and a decode worker on one core each, on the 121 M checkpoint. First nothing else runs; then the prefill worker
always has a long prompt, and a short one comes every half second; then four streams decode besides, without and with the long
prompts. Shown: the prompts' time to the first and to the second token, which needs the state, and the time between two tokens
of the streams (ITL). With --choice the router of a whole `tandem up` decides: the same arrivals while the prefill worker has
long prompts, with and without streams, once with `decode.local_prefill_tokens` 0.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import re
import time
import urllib.request
from dataclasses import dataclass, field
from itertools import pairwise

from bench.checkpoints import bench_checkpoint
from bench.pair import Outcome, WorkerPair, worker_pair
from bench.stats import quantile, summary_ms
from bench.up import UpCluster, up_cluster
from tandem.config import CacheConfig, DecodeConfig, ModelSource, WorkerConfig
from tandem.request import Request, SamplingParams, StopRules
from tandem.v1 import inference_pb2 as pb

__all__ = ["main"]

_VOCAB = 32000
_STREAMS = 4
_LONG_TOKENS = 2048
_EVERY_S = 0.5
_WAYS = {"shipped": False, "local": True}


@dataclass
class _Seen:
    """Seconds."""

    first: list[float] = field(default_factory=list)
    second: list[float] = field(default_factory=list)


class _Bench:
    def __init__(self, pair: WorkerPair) -> None:
        self.pair = pair
        self._rng = random.Random(1)
        self._numbers = itertools.count()

    def request(self, num_tokens: int, max_new_tokens: int) -> Request:
        prompt = tuple(self._rng.randrange(_VOCAB) for _ in range(num_tokens))
        return Request(f"r{next(self._numbers)}", prompt, SamplingParams(), StopRules(max_new_tokens))

    async def ask(self, num_tokens: int, seen: _Seen, *, is_local: bool) -> None:
        came_s = time.monotonic()
        outcome = await self.pair.start(self.request(num_tokens, 2), is_local=is_local)[1]
        if outcome.failed:
            raise SystemExit(f"a request failed: {outcome.failed.reason}")
        seen.first.append(outcome.first_token_s - came_s)
        seen.second.append(outcome.token_s[0] - came_s)

    async def streams(self) -> list[Outcome]:
        begun = [self.pair.start(self.request(128, 4000))[0] for _ in range(_STREAMS)]
        await self.pair.until(lambda: all(len(outcome.token_s) > 2 for outcome in begun))
        return begun


def _row(name: str, seen: _Seen) -> str:
    first, second = (
        f"{quantile(values, 0.5) * 1e3:8.1f} (most {max(values) * 1e3:6.1f})" for values in (seen.first, seen.second)
    )
    return f"{name:28} first token {first}   second {second}"


async def _alone(bench: _Bench, lengths: list[int], repeat: int) -> None:
    print("nothing else runs; ms, medians")
    for num_tokens in lengths:
        seen = {name: _Seen() for name in _WAYS}
        for turn in range(repeat + 1):
            for name, is_local in _WAYS.items():
                await bench.ask(num_tokens, _Seen() if turn == 0 else seen[name], is_local=is_local)
        for name, its in seen.items():
            print(_row(f"  {num_tokens} tokens, {name}", its))


async def _beside(bench: _Bench, streams: list[Outcome], num_tokens: int, seconds: float, *, is_busy: bool) -> None:
    print(f"\n{len(streams)} streams, a prompt of {num_tokens} every {_EVERY_S} s{', prefill worker busy' if is_busy else ''}")
    for name, is_local in (*_WAYS.items(), *([("none", None)] if streams else [])):
        seen, until_s = _Seen(), time.monotonic() + seconds
        marks = [len(stream.token_s) for stream in streams]
        feeding = asyncio.create_task(_feed(bench)) if is_busy else None
        asked = []
        while time.monotonic() < until_s:
            if is_local is not None:
                asked.append(asyncio.create_task(bench.ask(num_tokens, seen, is_local=is_local)))
            await asyncio.sleep(_EVERY_S)
        await asyncio.gather(*asked)
        gaps = [b - a for stream, mark in zip(streams, marks, strict=True) for a, b in pairwise(stream.token_s[mark:])]
        if feeding is not None:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)
        if seen.first:
            print(_row(f"  {name}", seen))
        if streams:
            print(f"  {name:26} ITL p50, p95, p99, most {summary_ms(gaps)}")


async def _feed(bench: _Bench) -> None:
    """The prefill worker always has a long prompt."""
    while True:
        await bench.pair.start(bench.request(_LONG_TOKENS, 2))[1]


async def _run(args: argparse.Namespace) -> None:
    config = WorkerConfig(
        model=ModelSource(str(bench_checkpoint()), max_context_tokens=4200),
        cache=CacheConfig(budget_bytes=1 << 30, max_sequences=32, prefix_gib=0.0),
        decode=DecodeConfig(local_prefill_tokens=256, local_prefill_share=args.share),
        threads=1,
    )
    cores = sorted(os.sched_getaffinity(0))
    async with worker_pair(config, cores=(cores[0], cores[-1])) as pair:
        bench = _Bench(pair)
        await _alone(bench, args.tokens, args.repeat)
        await _beside(bench, [], args.beside, args.seconds, is_busy=True)
        streams = await bench.streams()
        await _beside(bench, streams, args.beside, args.seconds, is_busy=False)
        await _beside(bench, streams, args.beside, args.seconds, is_busy=True)


async def _choice(args: argparse.Namespace) -> None:
    for most_tokens in (0, args.beside):
        worker = {
            "decode": {"local_prefill_tokens": most_tokens, "local_prefill_share": args.share},
            "cache": {"prefix_gib": 0.0},
            "threads": 1,
        }
        options = ("--model", str(bench_checkpoint()), "--memory-gib", "1")
        async with up_cluster(*options, settings={"worker": worker}) as cluster:
            print(f"decode.local_prefill_tokens {most_tokens}; ms")
            for num_streams in (0, _STREAMS):
                await _decided(cluster, args, num_streams)


async def _decided(cluster: UpCluster, args: argparse.Namespace, num_streams: int) -> None:
    rng, gaps, first = random.Random(1), list[float](), list[float]()

    async def ask(num_tokens: int, max_new_tokens: int, came: list[float], between: list[float]) -> None:
        ids = pb.TokenIds(ids=[rng.randrange(_VOCAB) for _ in range(num_tokens)])
        message = pb.GenerateRequest(token_ids=ids, max_new_tokens=max_new_tokens, ignore_eos=True)
        came_s, seen = time.monotonic(), list[float]()
        async for response in cluster.stub.Generate(message):
            seen += [time.monotonic()] * len(response.token_ids)
            came += [seen[0] - came_s] if len(seen) == 1 else []
            between += [seen[-1] - seen[-2]] if len(seen) > 1 and response.token_ids else []

    async def feed() -> None:
        while True:
            await ask(_LONG_TOKENS, 2, [], [])

    before = await asyncio.to_thread(_placed, cluster.url)
    others = [asyncio.create_task(ask(128, 4000, [], gaps)) for _ in range(num_streams)]
    await asyncio.sleep(2.0 if num_streams else 0.0)
    others.append(asyncio.create_task(feed()))
    await asyncio.sleep(1.0)
    gaps.clear()
    asked = []
    for _ in range(int(args.seconds / _EVERY_S)):
        asked.append(asyncio.create_task(ask(args.beside, 2, first, [])))
        await asyncio.sleep(_EVERY_S)
    await asyncio.gather(*asked)
    shown = f"  ITL p50, p95, p99, most {summary_ms(gaps)}" if num_streams else ""
    for other in others:
        other.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    after = await asyncio.to_thread(_placed, cluster.url)
    print(f"  {num_streams} streams: first token p50, p95, p99, most {summary_ms(first)}{shown}")
    print("    " + ", ".join(f"{where} {after[where] - before[where]:.0f}" for where in after))


def _placed(url: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answered:
        text = answered.read().decode()
    return {where: float(value) for where, value in re.findall(r'tandem_prompts_placed_total\{where="(\w+)"\} (\S+)', text)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 32, 64])
    parser.add_argument("--repeat", type=int, default=8)
    parser.add_argument("--beside", type=int, default=32, help="tokens of the prompts that come beside the streams")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each way beside the streams")
    parser.add_argument("--share", type=float, default=DecodeConfig().local_prefill_share)
    parser.add_argument("--choice", action="store_true", help="let the router decide")
    args = parser.parse_args()
    asyncio.run(_choice(args) if args.choice else _run(args))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
