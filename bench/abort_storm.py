"""Many clients leave at once: what is left of it afterwards, and what it cost.

    python -m bench.abort_storm [--clients 200] [--rounds 5] [--json FILE]

A cluster of `tandem up`. Each round measures the throughput of a fixed load, lets so many clients come and leave at random
moments (half of them cancel, half close their connection), waits until the pools are whole, and measures again. Compared are
the medians of before and after; machines drift, so each round has its own before, and beside tokens per second of the clock
stands the processor time of workers and router per token, which hardly depends on what else the machine does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import grpc
import grpc.aio

from bench.up import UpCluster, up_cluster
from tandem.rpc import create_channel
from tandem.v1 import inference_pb2 as pb
from tandem.v1 import inference_pb2_grpc as pb_grpc

__all__ = ["Round", "Speed", "main", "one_round", "storm", "throughput"]

_LOAD_STREAMS = 8
_LOAD_REQUESTS = 24
_LOAD_PROMPT, _LOAD_ANSWER = 150, 120
_LONGEST_PROMPT = 3000
_LONGEST_STAY_S = 4.0


@dataclass(frozen=True, slots=True)
class Speed:
    """tokens_per_s: by the clock. cpu_ms_per_token: of workers and router."""

    tokens_per_s: float
    cpu_ms_per_token: float


@dataclass(frozen=True, slots=True)
class Round:
    """before, after: the fixed load. left: clients that left before their answer was whole. whole_s: from the last
    departure until no worker held anything. wasted_chunks: that ran while their client's cancel came, since the start;
    worst_wasted_chunks: the most for one client."""

    before: Speed
    after: Speed
    left: int
    whole_s: float
    wasted_chunks: int
    worst_wasted_chunks: int


async def one_round(cluster: UpCluster, num_clients: int, seed: int) -> Round:
    before = await throughput(cluster)
    left = await storm(cluster.address, num_clients, seed)
    ended_s = time.monotonic()
    status = await cluster.until_whole(60)
    whole_s = time.monotonic() - ended_s
    after = await throughput(cluster)
    prefill = [worker for worker in status.workers if worker.role == "prefill"]
    wasted, worst = sum(w.wasted_chunks for w in prefill), max(w.worst_wasted_chunks for w in prefill)
    return Round(before, after, left, whole_s, wasted, worst)


async def throughput(cluster: UpCluster) -> Speed:
    """Of a load that is always the same, but for its prompts: none of them is found in a cache."""
    places = asyncio.Semaphore(_LOAD_STREAMS)
    rng = random.Random()

    async def one() -> int:
        async with places:
            return await _tokens_of(cluster.stub, _message(rng, _LOAD_PROMPT, _LOAD_ANSWER))

    begin_s, begin_cpu_s = time.monotonic(), await cluster.cpu_s()
    counts = await asyncio.gather(*(one() for _ in range(_LOAD_REQUESTS)))
    seconds, cpu_s = time.monotonic() - begin_s, await cluster.cpu_s() - begin_cpu_s
    return Speed(sum(counts) / seconds, 1000 * cpu_s / sum(counts))


async def storm(address: str, num_clients: int, seed: int) -> int:
    """They all come within a second, and each leaves at a moment of its own. Returns how many left unserved."""
    rng = random.Random(seed)
    async with create_channel(address) as shared:
        clients = [_leave_early(address, shared if number % 2 else None, rng) for number in range(num_clients)]
        return sum(await asyncio.gather(*clients))


async def _leave_early(address: str, shared: grpc.aio.Channel | None, rng: random.Random) -> bool:
    """shared: cancel on this channel; None: close one's own."""
    message = _message(rng, rng.randint(1, _LONGEST_PROMPT), rng.randint(1, 300))
    comes_s, stays_s = rng.random(), rng.uniform(0.0, _LONGEST_STAY_S)
    await asyncio.sleep(comes_s)
    channel = shared or create_channel(address)
    serving = asyncio.create_task(_tokens_of(pb_grpc.InferenceStub(channel), message))
    await asyncio.wait([serving], timeout=stays_s)
    served = serving.done()
    if shared is not None:
        serving.cancel()
    else:
        await channel.close()
    with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
        await serving
    return not served


async def _tokens_of(stub: pb_grpc.InferenceStub, message: pb.GenerateRequest) -> int:
    return sum([len(response.token_ids) async for response in stub.Generate(message)])


def _message(rng: random.Random, prompt_tokens: int, answer_tokens: int) -> pb.GenerateRequest:
    prompt = rng.choices(range(256), k=prompt_tokens)
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), max_new_tokens=answer_tokens, ignore_eos=True)


async def _measure(num_clients: int, num_rounds: int) -> list[Round]:
    rounds = []
    async with up_cluster("--memory-gib", "0.5", prefill=1, decode=1) as cluster:
        await throughput(cluster)  # warm
        for number in range(num_rounds):
            done = await one_round(cluster, num_clients, seed=number)
            rounds.append(done)
            print(f"round {number + 1}: {_line(done)}", flush=True)
    return rounds


def _line(done: Round) -> str:
    before, after = done.before, done.after
    return (
        f"{before.tokens_per_s:6.1f} → {after.tokens_per_s:6.1f} tokens/s, "
        f"{before.cpu_ms_per_token:5.2f} → {after.cpu_ms_per_token:5.2f} CPU ms/token; {done.left} left, "
        f"whole after {done.whole_s:.2f} s; wasted chunks {done.wasted_chunks}, at most {done.worst_wasted_chunks} for one"
    )


def _report(rounds: Sequence[Round]) -> str:
    lines = []
    for name, unit in (("tokens_per_s", "tokens/s"), ("cpu_ms_per_token", "CPU ms/token")):
        before = statistics.median(getattr(done.before, name) for done in rounds)
        after = statistics.median(getattr(done.after, name) for done in rounds)
        lines.append(f"medians of {unit}: {before:.2f} before, {after:.2f} after: {after / before - 1:+.1%}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    rounds = asyncio.run(_measure(args.clients, args.rounds))
    print(_report(rounds))
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump([asdict(one) for one in rounds], file, indent=1)


if __name__ == "__main__":
    main()
