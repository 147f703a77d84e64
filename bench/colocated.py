"""Prefill and decode in one process, interleaved: what disaggregation is measured against.

The same model, kernels and caches as a worker's. Each step advances every running sequence by one token and the oldest prompt
by a chunk, the remedy of engines that keep both phases on one device. The two are one forward pass (*mixed*) or two, one after
the other; which of them disturbs less depends on the kernels.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier

from tandem.config import WorkerConfig
from tandem.config_json import dump, load
from tandem.engine import Engine
from tandem.model.batch import SequenceChunk
from tandem.request import Request, SamplingParams, StopRules
from tandem.sampling import SequenceSampler, sample_each

__all__ = ["Arrival", "Served", "serve_colocated", "serve_unconnected"]

_LOADING_S = 120.0


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that comes `at_s` seconds after the clock has started. The clock starts when all requests of time 0 decode."""

    at_s: float
    prompt: tuple[int, ...]
    max_new_tokens: int


@dataclass(slots=True)
class Served:
    """Moments in seconds of the arrivals' clock: when it came, and when each token was there."""

    came_s: float
    token_s: list[float] = field(default_factory=list)


@dataclass(slots=True)
class _Sequence:
    served: Served
    request: Request
    block_ids: list[int]
    slot: int
    sampler: SequenceSampler
    num_absorbed: int = 0
    newest: int = -1

    @property
    def decodes(self) -> bool:
        return self.newest >= 0

    def chunk(self, most_tokens: int) -> SequenceChunk:
        if self.decodes:
            return SequenceChunk((self.newest,), self.num_absorbed, self.block_ids, self.slot)
        tokens = self.request.prompt[self.num_absorbed : self.num_absorbed + most_tokens]
        return SequenceChunk(tokens, self.num_absorbed, self.block_ids, self.slot)


class _Server:
    def __init__(self, engine: Engine, chunk_tokens: int, *, mixed: bool) -> None:
        self._engine = engine
        self._mixed = mixed
        self._chunk_tokens = chunk_tokens
        self.running: list[_Sequence] = []

    def join(self, arrival: Arrival, number: int, came_s: float) -> Served:
        request = Request(str(number), arrival.prompt, SamplingParams(), StopRules(arrival.max_new_tokens))
        count = self._engine.memory.specs.blocks_for(request.max_total_tokens)
        memory = self._engine.blocks.allocate(count), self._engine.slots.allocate(1)[0]
        served = Served(came_s)
        self.running.append(_Sequence(served, request, *memory, SequenceSampler(request, None)))
        return served

    def step(self, started_s: float) -> None:
        prompts = [s for s in self.running if not s.decodes][:1]
        decoding = [s for s in self.running if s.decodes]
        for batch in [decoding + prompts] if self._mixed else [decoding, prompts]:
            if batch:
                self._forward(batch, started_s)

    def _forward(self, batch: Sequence[_Sequence], started_s: float) -> None:
        chunks = [sequence.chunk(self._chunk_tokens) for sequence in batch]
        hidden_TD = self._engine.forward(chunks)
        ends, rows, ready = 0, [], []
        for sequence, chunk in zip(batch, chunks, strict=True):
            ends += len(chunk.tokens)
            sequence.num_absorbed += len(chunk.tokens)
            if sequence.num_absorbed >= len(sequence.request.prompt):
                rows.append(ends - 1)
                ready.append(sequence)
        if not ready:
            return
        drawn = sample_each(self._engine.logits(hidden_TD[rows]), [sequence.sampler.draw for sequence in ready])
        now = time.monotonic() - started_s
        for sequence, token in zip(ready, drawn, strict=True):
            assert isinstance(token, int), token
            sequence.newest = token
            sequence.sampler.append(token)
            sequence.served.token_s.append(now)
            if len(sequence.served.token_s) >= sequence.request.stop.max_new_tokens:
                self.running.remove(sequence)
                self._engine.blocks.free(sequence.block_ids)
                self._engine.slots.free([sequence.slot])


def serve_colocated(
    config: WorkerConfig,
    arrivals: Sequence[Arrival],
    seconds: float,
    cores: frozenset[int],
    *,
    chunk_tokens: int,
    mixed: bool,
) -> list[Served]:
    """Serve for so long in a process of its own that keeps to these cores, a compute thread for each. In order of arrival."""
    (served,) = _serve_each(config, [(arrivals, cores)], seconds, chunk_tokens, mixed)
    return served


def serve_unconnected(
    config: WorkerConfig, arrivals: Sequence[Arrival], seconds: float, cores: tuple[int, int], *, chunk_tokens: int
) -> list[Served]:
    """The prompts on the first core and the streams of time 0 on the second, in two processes that know nothing of each other.

    What prefill and decode apart could be at best on this machine: no hand-off, no messages, no newcomers among the streams. A
    prompt ends with its first token. The streams come first in the result."""
    streams = [arrival for arrival in arrivals if arrival.at_s <= 0]
    prompts = [replace(arrival, max_new_tokens=1) for arrival in arrivals if arrival.at_s > 0]
    shares = [(prompts, frozenset(cores[:1])), (streams, frozenset(cores[1:]))]
    served_prompts, served_streams = _serve_each(config, shares, seconds, chunk_tokens, mixed=False)
    return served_streams + served_prompts


def _serve_each(
    config: WorkerConfig,
    shares: Sequence[tuple[Sequence[Arrival], frozenset[int]]],
    seconds: float,
    chunk_tokens: int,
    mixed: bool,
) -> list[list[Served]]:
    """A process for each share of the arrivals, on cores of its own. Their clocks start together."""
    context = multiprocessing.get_context("spawn")
    all_ready = context.Barrier(len(shares))
    processes, pipes = [], []
    for arrivals, cores in shares:
        ours, theirs = context.Pipe()
        own = dump(replace(config, threads=len(cores)))
        how = (own, arrivals, seconds, cores, chunk_tokens, mixed, all_ready, theirs)
        processes.append(context.Process(target=_serve, args=how, daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    try:
        return [pipe.recv() for pipe in pipes]
    finally:
        for process in processes:
            process.join(timeout=10)
            process.kill()


def _serve(
    config_json: str,
    arrivals: Sequence[Arrival],
    seconds: float,
    cores: frozenset[int],
    chunk_tokens: int,
    mixed: bool,
    all_ready: Barrier,
    parent: Connection,
) -> None:
    os.sched_setaffinity(0, cores)
    server = _Server(Engine.build(load(WorkerConfig, config_json)), chunk_tokens, mixed=mixed)
    waiting = deque(enumerate(sorted(arrivals, key=lambda arrival: arrival.at_s)))
    served = []
    while waiting and waiting[0][1].at_s <= 0:
        number, arrival = waiting.popleft()
        served.append(server.join(arrival, number, 0.0))
    while not all(sequence.decodes for sequence in server.running):
        server.step(time.monotonic())
    all_ready.wait(_LOADING_S)
    for one in served:
        one.token_s.clear()
    started_s = time.monotonic()
    while (now := time.monotonic() - started_s) < seconds:
        while waiting and waiting[0][1].at_s <= now:
            number, arrival = waiting.popleft()
            served.append(server.join(arrival, number, arrival.at_s))
        if server.running:
            server.step(started_s)
        else:
            time.sleep(0.001)
    parent.send(served)
