"""The decode worker's loop: receive, decide, act, settle. One thread owns everything in here but the lease table."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Sequence
from functools import lru_cache

from decode_worker.inbox import AskSequence, CancelSequence, ComputePrompt, HandOver, Message, RouterGone, Stop
from decode_worker.local_prefill import LocalPrefill
from decode_worker.report import Reporter
from decode_worker.residency import Residency
from decode_worker.scheduler import Way, num_joins
from decode_worker.sequence import RunningSequence, VerifiedSequence
from decode_worker.traced import DecodeTraces
from tandem import logprobs
from tandem.buckets import concurrency_bucket
from tandem.cache.watch import PoolWatch
from tandem.clock import Clock
from tandem.config import DecodeConfig
from tandem.engine import Engine, engine_grammars
from tandem.errors import Evicted, HandoffError, InvalidRequest, LeaseLost, Leaving, TandemError
from tandem.mailbox import Inbox, SessionHub
from tandem.measures import ALL, Measures
from tandem.model.batch import SequenceChunk
from tandem.prompt_output import PromptOutput
from tandem.request import Drawn, FinishReason
from tandem.sampling import sample_each
from tandem.tracing import NO_TRACER, Tracer
from tandem.v1 import worker_pb2 as pb
from transfer.kept_index import KeptIndex
from transfer.lease import Lease, LeaseTable
from transfer.lease_state import LeaseState

__all__ = ["DecodeLoop"]

logger = logging.getLogger(__name__)

_IDLE_WAIT_S = 0.5
# Whose memory an evicted sequence waits for, when nothing runs, is freed by other threads.
_WAIT_FOR_ROOM_S = 0.01


class DecodeLoop:
    """Every step advances every running sequence by one token, in one batched forward pass.

    Memory rule: blocks and slots belong to leases. The loop ends a lease when its sequence ends; the table decides what
    that frees. Between two steps `Residency` gives each sequence the block that it needs next, and takes memory from one
    when there is none left.
    """

    def __init__(
        self,
        engine: Engine,
        config: DecodeConfig,
        leases: LeaseTable,
        hub: SessionHub[pb.DecodeEvents],
        clock: Clock,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self.inbox: Inbox[Message] = Inbox()
        self._engine = engine
        self._grammars = engine_grammars(engine)
        self._config = config
        self._leases = leases
        self._report = Reporter(hub)
        self._traced = DecodeTraces(tracer)
        self._clock = clock
        self._verified: deque[VerifiedSequence] = deque()
        self._running: list[RunningSequence] = []
        self._residency = Residency(engine, leases, clock, int(config.swap_gib * 2**30))
        self.local = LocalPrefill(engine, PromptOutput(engine, self._grammars), clock, self._report.prefill_started)
        self._watch = PoolWatch(leases.history, clock)
        self._stopping = False
        self._step_s = self._busy_s = 0.0
        self.measures = Measures()

    def run(self) -> None:
        while not self._stopping:
            is_busy = self._running or self._verified or self.local.waiting
            self.turn(wait_s=0.0 if is_busy else self._idle_wait_s)

    def turn(self, wait_s: float) -> None:
        """Once around. `wait_s`: how long to wait for a message when none is there."""
        self._advance(wait_s)
        if self.local.waiting:
            self._compute_prompt()

    def _advance(self, wait_s: float) -> None:
        """All but the prompts that are computed here: between two of these, or where one gives way."""
        self._receive(wait_s)
        self._running += self._residency.bring_back(len(self._running))
        self._join()
        self._make_room()
        if self._running:
            self._step()
        else:
            self._check_pools()

    def load(self) -> pb.WorkerLoad:
        """Called from the session's thread: numbers may be one step old."""
        return pb.WorkerLoad(
            queue=len(self._verified) + self._residency.num_away + self.local.num_waiting,
            queue_tokens=self.local.num_waiting_tokens,
            running=len(self._running),
            kv_blocks_used=self._leases.num_blocks_used(),
            kv_blocks_total=self._engine.blocks.size,
            state_slots_used=self._engine.slots.num_used,
            state_slots_total=self._engine.slots.size,
            leases=self._leases.counts_by_state(),
            lease_ages=self._leases.oldest_age_by_state(),
            pool_mismatches=self._watch.num_missing,
            step_seconds=self._step_s,
            kv_blocks_counted=self._leases.num_blocks_counted(),
            overcommit=self._config.overcommit,
            batch_share=self._config.batch_share,
            evictions={way.value: count for way, count in self._residency.num_evictions.items()},
            busy_seconds=self._busy_s,
            prefixes=_to_wire(self._leases.kept()),
            token_seconds=self.local.token_s,
            local_prefill_tokens=self._config.local_prefill_tokens,
            local_prefill_share=self._config.local_prefill_share,
        )

    @property
    def _idle_wait_s(self) -> float:
        return _WAIT_FOR_ROOM_S if self._residency.num_away else _IDLE_WAIT_S

    # ---- receive ----

    def _receive(self, wait_s: float) -> None:
        for message in self.inbox.take(wait_s):
            match message:
                case VerifiedSequence():
                    self._verified.append(message)
                case CancelSequence((request_id, attempt)):
                    lease = self._leases.find_or_refuse(request_id, attempt)
                    self._drop([lease] if lease else [])
                case ComputePrompt(lease):
                    self.local.waiting.append(lease)
                case AskSequence((request_id, attempt), router_id):
                    known = self._leases.find(request_id, attempt) is not None
                    self._report.standing(router_id, request_id, attempt, known=known)
                case RouterGone(leases):
                    self._drop(leases)
                case HandOver():
                    self._hand_over()
                case Stop():
                    self._stopping = True

    def _drop(self, unwanted: Sequence[Lease]) -> None:
        """Nobody waits for these any more, at whatever point of their life they are."""
        ids = {lease.id for lease in unwanted}
        being_written = self.local.forget(ids)
        for lease in unwanted:
            if lease.id not in being_written:
                self._end(lease, "cancelled")
        self._verified = deque(v for v in self._verified if v.lease.id not in ids)
        self._running = [s for s in self._running if s.lease.id not in ids]
        self._residency.forget(ids)

    def _hand_over(self) -> None:
        leases = self._leases.all_live()
        for lease in leases:
            self._report.failed(lease, Leaving("the decode worker ends; the request goes on elsewhere"))
        self._drop(leases)

    # ---- decide and act ----

    def _join(self) -> None:
        standing = len(self._verified), len(self._running), self._residency.num_away
        count = num_joins(*standing, self._config.max_batch, self._config.max_joins_per_step)
        for _ in range(count):
            verified = self._verified.popleft()
            try:
                lease = self._leases.start_running(verified.lease.id, verified.lease.epoch)
            except LeaseLost:
                logger.warning("lease %s ended before its sequence could join", verified.lease.id)
                continue
            self._residency.rates.prefill.note(verified.num_positions, _came_in_s(lease))
            try:
                self._running.append(RunningSequence.join(verified, self._grammars))
            except InvalidRequest as error:
                self._report.failed(verified.lease, error)
                self._end(verified.lease, "no grammar")

    def _make_room(self) -> None:
        self._running, evicted = self._residency.make_room(self._running)
        for eviction in evicted:
            if eviction.way is Way.PREFILL:
                self._report.failed(eviction.sequence.lease, Evicted("too little memory for all that runs on this worker"))
                self._end(eviction.sequence.lease, "evicted, goes through prefill again")

    def _step(self) -> None:
        started_s = self._clock.now()
        try:
            outcomes = self._compute(self._running)
        except Exception:  # the step ends here, and with it these sequences only: the worker goes on
            logger.exception("a decode step over %d sequences failed", len(self._running))
            for sequence in self._running:
                self._report.failed(sequence.lease, HandoffError("decode failed on this worker; see its log"))
                self._end(sequence.lease, "step failed")
            self._running = []
            return
        self._step_s = self._clock.now() - started_s
        size = len(self._running)
        self.measures.observe("decode_step_seconds", self._step_s, ALL, concurrency_bucket(size), ALL)
        self.measures.observe("decode_batch_size", size)
        self._busy_s += self._step_s
        self._settle(outcomes)

    def _compute(self, running: Sequence[RunningSequence]) -> list[Drawn | TandemError]:
        """The next token of each sequence, or why it cannot have one."""
        chunks = [
            SequenceChunk(
                tokens=(sequence.last_token,),
                context_tokens=sequence.context_tokens,
                block_ids=sequence.lease.block_ids,
                slot=sequence.lease.slot,
            )
            for sequence in running
        ]
        logits_BV = self._engine.logits(self._engine.forward(chunks))
        tokens = sample_each(logits_BV, [sequence.sampler.draw for sequence in running])
        return logprobs.told(logits_BV, tokens, [s.lease.request.output.logprobs for s in running])

    def _compute_prompt(self) -> None:
        prompt = self.local.compute_next(self._take_turns)
        lease = prompt.lease
        if not isinstance(prompt.outcome, Drawn):
            if prompt.outcome is not None:
                self._report.failed(lease, prompt.outcome)
            self._end(lease, str(prompt.outcome or "cancelled"))
            return
        request, first_token = lease.request, prompt.outcome.token
        self.measures.add("local_prefill_tokens", len(request.tokens), request.service_class.value)
        verified = VerifiedSequence(self._leases.computed(lease.id, lease.epoch), len(request.tokens), first_token)
        self._traced.computed(prompt)
        self._report.first_token(lease, prompt.outcome, prompt.prefill_s, prompt.prompt_logprobs)
        if request.stop.finish_reason(len(request.generated) + 1, first_token) is not None:
            self._end(verified.lease, "the first token ended the answer")
            return
        self._report.ready(verified.lease, 0.0)
        self._verified.append(verified)

    def _take_turns(self, spent_s: float) -> bool:
        """See `TakeTurns`. While nothing runs, whoever has just come may."""
        if self._running and spent_s < self._config.local_prefill_share * self._step_s:
            return False
        self._advance(wait_s=0.0)
        return True

    # ---- settle ----

    def _settle(self, outcomes: Sequence[Drawn | TandemError]) -> None:
        advanced: list[RunningSequence] = []
        finished: dict[str, FinishReason] = {}
        for sequence, drawn in zip(self._running, outcomes, strict=True):
            if isinstance(drawn, TandemError):
                self._report.failed(sequence.lease, drawn)
                self._end(sequence.lease, str(drawn))
                continue
            advanced.append(sequence)
            if reason := sequence.advance(drawn):
                finished[sequence.lease.id] = reason
                self._leases.release(sequence.lease.id, sequence.lease.epoch)
                self._traced.finished(sequence, reason)
        for service_class, count in Counter(s.lease.request.service_class.value for s in advanced).items():
            self.measures.add("decode_tokens", count, service_class)
        # First what runs, then what is told: the load that goes with the last token is that of a worker without it.
        self._running = [sequence for sequence in advanced if sequence.lease.id not in finished]
        self._report.step(advanced, finished)

    def _end(self, lease: Lease, cause: str) -> None:
        try:
            self._traced.ended(self._leases.abort(lease.id, cause))
        except LeaseLost:
            logger.debug("lease %s had already ended", lease.id)

    def _check_pools(self) -> None:
        """Invariant: live leases and free indices sum to the pools' sizes."""
        used = self._engine.blocks.num_used, self._engine.slots.num_used
        self._watch.look_if_due(used, self._leases.check)


@lru_cache(maxsize=4)
def _to_wire(kept: KeptIndex) -> pb.PrefixIndex:
    """The same one is asked for at every step of every session."""
    return pb.PrefixIndex(version=kept.version, names=kept.names, num_tokens=kept.num_tokens, parents=[0] * len(kept.names))


def _came_in_s(lease: Lease) -> float:
    """From reservation to verified: what it takes to bring a sequence in through prefill."""
    moments = {step.state: step.at_s for step in lease.history}
    return moments[LeaseState.VERIFIED] - moments[LeaseState.RESERVED]
