"""A decode worker's loop, leases and receiver's part in one process, with prompts computed in place: what a pair does, without
the wire. Whoever is evicted to go through prefill again does so, with the tokens so far."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from decode_worker.loop import DecodeLoop
from decode_worker.scheduler import Way
from decode_worker.sequence import VerifiedSequence
from tandem.clock import FakeClock
from tandem.config import DecodeConfig
from tandem.errors import NoRoom
from tandem.model.batch import SequenceChunk
from tandem.request import Request
from tandem.sampling import SequenceSampler, sample
from tandem.v1 import worker_pb2 as pb
from transfer.lease import Lease, LeaseTable
from transfer.lease_memory import AdmissionPolicy

EPOCH = 1


@dataclass
class _Hub:
    """Takes what the loop reports."""

    events: list[pb.DecodeEvents] = field(default_factory=list)

    def post(self, router_id: str, message: pb.DecodeEvents) -> None:
        self.events.append(message)


@dataclass
class Job:
    """One request: what was delivered so far, and how often it was sent through prefill again."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    attempt: int = 1
    is_done: bool = False


class Pair:
    """engine: as `tandem.engine.Engine`. chunk_tokens: prompt tokens computed at once. num_steps, num_evicting: decode steps so
    far, and those for which somebody had to give way. num_held: blocks that reservations found there already."""

    def __init__(self, engine: Any, config: DecodeConfig, chunk_tokens: int = 1 << 20) -> None:
        self.engine = engine
        self.config = config
        self.clock = FakeClock()
        policy = AdmissionPolicy(config.overcommit, config.batch_share, config.keep_prefixes)
        specs = engine.memory.specs
        self.leases = LeaseTable(engine.blocks, engine.slots, specs, self.clock, 60.0, EPOCH, policy)
        self.hub = _Hub()
        self.loop = DecodeLoop(engine, config, self.leases, self.hub, self.clock)  # type: ignore[arg-type]
        self.num_turns = self.num_steps = self.num_evicting = 0
        self.chunk_tokens = chunk_tokens
        self.most_running = self.num_held = 0

    @property
    def evictions(self) -> Counter[Way]:
        return self.loop._residency.num_evictions

    def run(self, requests: Sequence[Request], most_turns: int = 20_000) -> list[Job]:
        jobs = [Job(request) for request in requests]
        by_id = {job.request.request_id: job for job in jobs}
        waiting = deque(jobs)
        while not all(job.is_done for job in jobs):
            assert self.num_turns < most_turns, "nothing moves"
            while waiting and self._begin(waiting[0]):
                waiting.popleft()
            self.turn()
            for event in self.take_events():
                for told in event.tokens:
                    self._deliver(by_id[told.request_id], told)
                for failed in event.failed:
                    assert (failed.kind, failed.retryable) == ("Evicted", True), failed
                    job = by_id[failed.request_id]
                    job.attempt += 1
                    waiting.appendleft(job)
        assert self.is_whole
        return jobs

    def turn(self) -> None:
        self.num_turns += 1
        self.clock.advance(0.01)
        num_events, num_evicted = len(self.hub.events), self.evictions.total()
        self.loop.turn(wait_s=0.0)
        self.num_steps += any(event.tokens for event in self.hub.events[num_events:])
        self.num_evicting += self.evictions.total() > num_evicted
        self.most_running = max(self.most_running, len(self.loop._running))
        assert self.leases.check() == []

    def take_events(self) -> list[pb.DecodeEvents]:
        events, self.hub.events = self.hub.events, []
        return events

    @property
    def is_whole(self) -> bool:
        host_bytes = int(self.config.swap_gib * 2**30)
        nothing_used = self.leases.num_blocks_used() == self.engine.slots.num_used == 0
        return self.leases.check() == [] and nothing_used and self.loop._residency._free_host_bytes == host_bytes

    def _begin(self, job: Job) -> bool:
        """Reserve, compute the prompt into what was reserved, hand it over. False: there is no room."""
        request = replace(job.request, generated=tuple(job.tokens))
        try:
            lease = self.leases.reserve(request, job.attempt, "router", "prefill-1", may_share=True)
        except NoRoom:
            return False
        held = list(lease.block_ids[: lease.num_held])
        before = [kv[held].clone() for kv in self.engine.memory.kv.values()]
        first = self.prefill(request, lease)
        for kv, kept in zip(self.engine.memory.kv.values(), before, strict=True):
            kv[held] = kept  # it does not travel
        self.num_held += lease.num_held
        job.tokens.append(first)
        if request.stop.finish_reason(len(job.tokens), first) is not None:
            self.leases.writer_quiet(lease.id, EPOCH, "prefill-1")
            job.is_done = True
            return True
        self.clock.advance(0.001 * len(request.tokens))
        verified = self.leases.verified(lease.id, EPOCH)
        self.loop.inbox.put(VerifiedSequence(verified, len(request.tokens), first))
        return True

    def prefill(self, request: Request, lease: Lease) -> int:
        """The first token."""
        tokens = request.tokens
        for start in range(0, len(tokens), self.chunk_tokens):
            chunk = tokens[start : start + self.chunk_tokens]
            hidden = self.engine.forward([SequenceChunk(chunk, start, lease.block_ids, lease.slot)])
        return sample(self.engine.logits(hidden[-1:]), [SequenceSampler(request).draw()])[0]

    @staticmethod
    def _deliver(job: Job, told: pb.SequenceTokens) -> None:
        assert told.attempt == job.attempt
        assert told.index == len(job.tokens), "a token was skipped or told twice"
        job.tokens.extend(told.tokens)
        job.is_done = job.is_done or bool(told.finish_reason)
