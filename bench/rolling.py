"""Pools that are scaled, drained and replaced under load: what the streams feel of it.

    python -m bench.rolling [--streams 8] [--drain-s S] [--json FILE]

`tandem up` with one worker of each kind and room for four. Streams run all the time, one request after another. Meanwhile each
pool goes from 1 to 3 workers and back, one worker of each is drained, and each pool is replaced. Per event: how long it took,
the longest gap between two tokens of any stream, the longest wait for a first token, and how many requests were placed again.
Every answer is held against the one that the same cluster gave before, undisturbed; the processes of the other pool must stay.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

import grpc.aio

from bench.up import UpCluster, up_cluster
from tandem.v1 import inference_pb2 as pb
from tandem.v1 import operations_pb2

__all__ = ["Event", "Question", "Streams", "ask", "drain", "main", "operate", "replace", "scale"]

_EVENT_S = 180.0
_ANSWER_TOKENS = 250
_NUM_QUESTIONS = 12


@dataclass(frozen=True, slots=True)
class Question:
    """expected: the tokens of its answer; empty: not known."""

    prompt: tuple[int, ...]
    num_tokens: int
    expected: tuple[int, ...] = ()


@dataclass(slots=True)
class Streams:
    """So many at once until `stop`. gaps: (moment, seconds since the token before); firsts: (moment, wait for a first token);
    again: moments of ends of requests that were placed again. problems: failures and tokens that differ."""

    cluster: UpCluster
    questions: Sequence[Question]
    gaps: list[tuple[float, float]] = field(default_factory=list)
    firsts: list[tuple[float, float]] = field(default_factory=list)
    again: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    num_answers: int = 0
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _stopping: bool = False

    def start(self, count: int) -> None:
        turns = itertools.cycle(self.questions)
        self._tasks = [asyncio.create_task(self._stream(turns), name=f"stream {number}") for number in range(count)]

    async def stop(self) -> None:
        """Let what runs come to its end."""
        self._stopping = True
        await asyncio.gather(*self._tasks)

    async def _stream(self, turns: itertools.cycle[Question]) -> None:
        while not self._stopping:
            await self._one(next(turns))

    async def _one(self, question: Question) -> None:
        asked_s = last_s = time.monotonic()
        tokens: list[int] = []
        attempts = 0
        try:
            async for response in self.cluster.stub.Generate(_message(question)):
                now_s = time.monotonic()
                if response.token_ids:
                    (self.gaps if tokens else self.firsts).append((now_s, now_s - (last_s if tokens else asked_s)))
                    last_s = now_s
                    tokens += response.token_ids
                if response.HasField("finished"):
                    attempts = response.finished.attempts
        except grpc.aio.AioRpcError as error:
            self.problems.append(f"{error.code().name}: {error.details()}")
            return
        self.num_answers += 1
        if tuple(tokens) != question.expected:
            pairs = enumerate(zip(tokens, question.expected, strict=False))
            same = next((at for at, (token, wanted) in pairs if token != wanted), min(len(tokens), len(question.expected)))
            self.problems.append(f"{len(tokens)} tokens came, the first {same} as before, in {attempts} attempts")
        if attempts > 1:
            self.again.append(time.monotonic())


@dataclass(frozen=True, slots=True)
class Event:
    """Seconds. stall_s: the longest gap between tokens meanwhile; first_s: the longest wait for a first token."""

    name: str
    took_s: float
    stall_s: float
    first_s: float
    again: int


def _message(question: Question) -> pb.GenerateRequest:
    ids = pb.TokenIds(ids=question.prompt)
    return pb.GenerateRequest(token_ids=ids, max_new_tokens=question.num_tokens, ignore_eos=True)


async def ask(cluster: UpCluster, question: Question) -> tuple[int, ...]:
    return tuple([token async for response in cluster.stub.Generate(_message(question)) for token in response.token_ids])


# ---- what is done to a pool ----


async def scale(cluster: UpCluster, role: str, wanted: int) -> None:
    await cluster.operations.Scale(operations_pb2.ScaleRequest(wanted={role: wanted}))
    await cluster.until(lambda status: _settled(status, role, wanted), _EVENT_S)


async def drain(cluster: UpCluster, role: str, timeout_s: float | None = None) -> None:
    (worker, *_) = await cluster.workers(role)
    await cluster.operations.Drain(operations_pb2.DrainRequest(worker_id=worker.id, timeout_s=timeout_s))
    wanted = (await cluster.status()).pools[role].wanted
    await cluster.until(
        lambda status: worker.id not in {w.id for w in status.workers} and _settled(status, role, wanted), _EVENT_S
    )


async def replace(cluster: UpCluster, role: str) -> None:
    old = set((await cluster.operations.Replace(operations_pb2.ReplaceRequest(pool=role))).worker_ids)
    wanted = (await cluster.status()).pools[role].wanted
    await cluster.until(lambda status: not old & {w.id for w in status.workers} and _settled(status, role, wanted), _EVENT_S)


def _settled(status: operations_pb2.Status, role: str, wanted: int) -> bool:
    pool = status.pools[role]
    return pool.wanted == wanted == pool.ready and not pool.reason


async def operate(streams: Streams, name: str, role: str, act: Callable[[], Awaitable[None]]) -> Event:
    """One event, with what the streams felt of it. The other pool's processes must be the same after it."""
    cluster = streams.cluster
    other = "decode" if role == "prefill" else "prefill"
    before = {worker.pid for worker in await cluster.workers(other)}
    begin_s = time.monotonic()
    await act()
    end_s = time.monotonic()
    if (after := {worker.pid for worker in await cluster.workers(other)}) != before:
        streams.problems.append(f"{name}: processes of the {other} pool were {before} and are {after}")
    return _felt(streams, name, begin_s, end_s)


def _felt(streams: Streams, name: str, begin_s: float, end_s: float) -> Event:
    def longest(values: Sequence[tuple[float, float]]) -> float:
        return max((seconds for moment, seconds in values if begin_s <= moment <= end_s), default=0.0)

    again = sum(begin_s <= moment <= end_s for moment in streams.again)
    return Event(name, end_s - begin_s, longest(streams.gaps), longest(streams.firsts), again)


async def run(num_streams: int, drain_s: float | None, say: Callable[[str], None]) -> tuple[list[Event], Streams]:
    async with up_cluster("--memory-gib", "0.3", "--max-prefill", "4", "--max-decode", "4") as cluster:
        questions = [Question(_prompt(number), _ANSWER_TOKENS) for number in range(_NUM_QUESTIONS)]
        known = [Question(q.prompt, q.num_tokens, await ask(cluster, q)) for q in questions]
        streams = Streams(cluster, known)
        streams.start(num_streams)
        plan: list[tuple[str, str, Callable[[], Awaitable[None]]]] = [
            ("undisturbed, 10 s", "decode", partial(asyncio.sleep, 10.0))
        ]
        for role in ("prefill", "decode"):
            plan += [
                (f"scale {role} 1 → 3", role, partial(scale, cluster, role, 3)),
                (f"scale {role} 3 → 1", role, partial(scale, cluster, role, 1)),
                (f"drain a {role} worker", role, partial(drain, cluster, role, drain_s)),
                (f"replace the {role} pool", role, partial(replace, cluster, role)),
            ]
        events = []
        for name, role, act in plan:
            events.append(await operate(streams, name, role, act))
            say(_row(events[-1]))
        await streams.stop()
    return events, streams


def _prompt(number: int) -> tuple[int, ...]:
    return tuple((number * 37 + 11 * i * i) % 256 for i in range(80 + 40 * number))


def _row(event: Event) -> str:
    return f"{event.name:<26}{event.took_s:>9.1f}{event.stall_s:>11.3f}{event.first_s:>16.3f}{event.again:>14}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--drain-s", type=float, metavar="S", help="timeout of the drains (default: drain_s of the cluster)")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    print(f"{'event':<26}{'took, s':>9}{'stall, s':>11}{'first token, s':>16}{'placed again':>14}")
    events, streams = asyncio.run(run(args.streams, args.drain_s, lambda line: print(line, flush=True)))
    print(f"\n{streams.num_answers} answers, {len(streams.problems)} of them broken or changed")
    for problem in streams.problems:
        print(f"  {problem}")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"events": [asdict(event) for event in events], "problems": streams.problems}, file, indent=1)


if __name__ == "__main__":
    main()
