"""The prefill worker's loop: receive, decide, act, settle. One thread owns everything in here."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence, Set
from typing import Protocol

from prefill_worker.absorber import Absorber
from prefill_worker.chunk_size import ChunkSizer
from prefill_worker.chunk_step import ChunkStep
from prefill_worker.holdings import Holdings
from prefill_worker.inbox import (
    AbsorbAnswer,
    AskTask,
    CancelTask,
    Drain,
    HandoffEnded,
    HandOver,
    MemoryQuiet,
    Message,
    ReservationEnded,
    RouterGone,
    Stop,
)
from prefill_worker.mail import Mail
from prefill_worker.measured import PrefillMeasures
from prefill_worker.memory import PromptMemory
from prefill_worker.prompt import Key, LocalMemory, PrefillTask, ReservingPrompt, RunningPrompt
from prefill_worker.prompts import PromptTable
from prefill_worker.report import Reporter
from prefill_worker.scheduler import (
    ChunkPlan,
    PrefillPolicy,
    num_tokens_between_layers,
    plan_between_layers,
    plan_step,
)
from prefill_worker.traced import PrefillTraces
from prefill_worker.waste import WasteCount
from tandem.cache.watch import PoolWatch
from tandem.clock import Clock
from tandem.config import PrefillConfig
from tandem.engine import Engine, engine_grammars
from tandem.errors import HandoffError, Leaving, NoRoom, Overloaded, TandemError
from tandem.mailbox import Inbox, SessionHub
from tandem.measures import Measures
from tandem.request import Drawn
from tandem.tracing import NO_TRACER, Tracer
from tandem.v1 import worker_pb2 as pb
from transfer.handoff import Handoff, HandoffResult, LeaseGrant

__all__ = ["HandoffSource", "PrefillLoop", "ReservationClient"]

logger = logging.getLogger(__name__)

_IDLE_WAIT_S = 1.0
_QUICK_ANSWER_S = 0.1
# A reservation takes milliseconds, a layer of a large step takes tens: the answer is worth waiting for.
_BETWEEN_LAYERS_S = 0.02
_LEAVING = Leaving("the prefill worker ends; the request goes on elsewhere")


class ReservationClient(Protocol):
    """The decode workers, as the loop needs them. Calls return at once; answers arrive in the inbox."""

    def reserve(self, task: PrefillTask) -> None:
        """Ask for a lease; the answer is a `ReservationEnded`."""
        ...

    def release(self, grant: LeaseGrant, reason: str, *, record_sent: bool = False) -> None:
        """Tell the decode worker that no write of this lease is in flight and none will follow; record_sent: but the
        record is on its way."""
        ...


class HandoffSource(Protocol):
    def begin(self, task: PrefillTask, grant: LeaseGrant, memory: LocalMemory) -> Handoff:
        """Start to send from `memory` into what `grant` names. Raises HandoffError: the grant cannot be used."""
        ...


class PrefillLoop:
    """Owns the pools of its engine, every prompt placed here, and the order in which they are computed.

    Memory rule: a prompt gives its blocks and slot back when its hand-off succeeded, or when the sender reports that no write
    reads from them any more. Nothing else does. What it shares with other prompts is held by each of them.
    """

    def __init__(
        self,
        engine: Engine,
        config: PrefillConfig,
        handoffs: HandoffSource,
        reservations: ReservationClient,
        hub: SessionHub[pb.PrefillEvents],
        clock: Clock,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self.inbox: Inbox[Message] = Inbox()
        self._mail = Mail()
        self._holdings = Holdings(clock)
        self._watch = PoolWatch(self._holdings.history, clock)
        self._engine = engine
        self._chunk_step = ChunkStep(engine, engine_grammars(engine))
        self._memory = PromptMemory(engine, config, self._holdings)
        self._absorber = Absorber(engine, self._memory, config.absorb_chunk_tokens, config.checkpoint_every_tokens)
        self._config = config
        self._handoffs = handoffs
        self._reservations = reservations
        self._report = Reporter(hub)
        self._clock = clock
        policy = PrefillPolicy(config.chunk_tokens, engine.tile_tokens, config.ageing, config.batch_share)
        self._sizes = ChunkSizer.of(policy, engine.memory.specs.block_bytes / engine.block_size_tokens)
        self._prompts = PromptTable()
        self._batch_credit = 0.0
        self._stopping = False
        self._draining = False
        self._step_s = self._busy_s = self._interludes_s = 0.0
        self.waste = WasteCount()
        self.measures = Measures()
        self._measured = PrefillMeasures(self.measures)
        self._traced = PrefillTraces(tracer)

    def run(self) -> None:
        while not self._stopping:
            self.turn(wait_s=0.0 if self._prompts.running or self._absorber.has_work else _IDLE_WAIT_S)

    def turn(self, wait_s: float) -> None:
        """Once around. `wait_s`: how long to wait for a message when none is there."""
        self._receive(wait_s)
        self._drop_hopeless()
        self._start_waiting()
        plan = plan_step(self._prompts.works(), self._sizes.policy, self._batch_credit)
        self._batch_credit = plan.batch_credit
        if plan.chunks:
            self._step(plan.chunks)
            self._memory.publish()
        elif self._absorber.has_work:
            self._absorber.step(self._between_layers(frozenset(), math.inf))
            self._memory.publish()
        elif self._prompts.is_empty:
            self._check_pools()

    def load(self) -> pb.WorkerLoad:
        """Called from the session's thread: numbers may be one step old."""
        return pb.WorkerLoad(
            queue=len(self._prompts.waiting) + len(self._prompts.reserving),
            queue_tokens=self._prompts.num_queued_tokens,
            running=len(self._prompts.running) + len(self._prompts.leaving),
            kv_blocks_used=self._memory.num_blocks_held,
            kv_blocks_total=self._engine.blocks.size,
            state_slots_used=self._engine.slots.num_used,
            state_slots_total=self._engine.slots.size,
            step_seconds=self._step_s,
            busy_seconds=self._busy_s,
            oldest_wait_seconds=self._prompts.oldest_wait_s(self._clock.now()),
            wasted_chunks=self.waste.total_chunks,
            worst_wasted_chunks=self.waste.worst_chunks,
            prefixes=self._memory.index,
            pool_mismatches=self._watch.num_missing,
        )

    # ---- receive ----

    def _receive(self, wait_s: float) -> None:
        for message in self._mail.take(self.inbox, wait_s):
            self._obey(message)

    def _obey(self, message: Message) -> None:
        match message:
            case PrefillTask():
                self._accept(message)
            case AbsorbAnswer(task):
                self._absorber.offer(task)
            case ReservationEnded(key, outcome):
                self._reservation_ended(key, outcome)
            case HandoffEnded(key, outcome):
                self._handoff_ended(key, outcome)
            case MemoryQuiet(key):
                self._memory_quiet(key)
            case CancelTask(key):
                self.waste.dropped(key)
                self._drop(lambda task: task.key == key)
            case AskTask(key, router_id):
                self._report.standing(router_id, *key, known=self._prompts.knows(key))
            case RouterGone(router_id):
                self._drop(lambda task: task.router_id == router_id)
            case Drain():
                self._draining = True
                self._absorber.clear()
                self._hand_over({prompt.task.key for prompt in self._prompts.waiting})
            case HandOver():
                self._hand_over({task.key for task in self._prompts.tasks()})
            case Stop():
                self._stopping = True

    def _accept(self, task: PrefillTask) -> None:
        blocks_needed = self._engine.memory.specs.blocks_for(task.num_tokens)
        if self._prompts.knows(task.key):
            logger.warning("request %s attempt %d was placed here twice; the second is ignored", *task.key)
        elif self._draining:
            self._report.failed(task, _LEAVING)
        elif (num_waiting := len(self._prompts.waiting)) >= self._config.max_queue:
            self._report.failed(task, Overloaded(f"{num_waiting} prompts wait at this prefill worker", retry_after_s=1.0))
        elif blocks_needed > self._engine.blocks.size:
            self._report.failed(
                task, NoRoom(f"the prompt needs {blocks_needed} KV blocks, this worker has {self._engine.blocks.size}")
            )
        else:
            self._prompts.wait(task)

    def _reservation_ended(self, key: Key, outcome: LeaseGrant | TandemError) -> None:
        reserving = self._prompts.reserving.pop(key)
        if isinstance(outcome, TandemError):
            self._memory.free(reserving.memory)
            if not reserving.cancelled:
                self._report.failed(reserving.task, outcome)
        elif reserving.cancelled:
            self._memory.free(reserving.memory)
            self._reservations.release(outcome, "cancelled")
        else:
            self._begin_handoff(reserving, outcome)

    def _begin_handoff(self, reserving: ReservingPrompt, grant: LeaseGrant) -> None:
        task, memory = reserving.task, reserving.memory
        try:
            handoff = self._handoffs.begin(task, grant, memory)
        except HandoffError as error:  # nothing was written under this grant
            self._memory.free(memory)
            self._reservations.release(grant, str(error))
            self._report.failed(task, error)
        else:
            self._begin(task, memory, reserving.came_at, grant, handoff)

    def _handoff_ended(self, key: Key, outcome: HandoffResult | TandemError) -> None:
        prompt = self._prompts.leaving.get(key)
        if prompt is None:
            return
        if isinstance(outcome, TandemError):
            self._report.failed(prompt.task, outcome)
            self._abort(prompt, str(outcome))
        else:
            del self._prompts.leaving[key]
            self._memory.free(prompt.memory)
            self._sizes.handed_off(outcome)
            self._report.handed_off(prompt.task, outcome)
            self._measured.handed_off(prompt.task, outcome, len(self._prompts.leaving) + 1)
            if prompt.grant is not None:
                self._traced.handed_off(prompt.task, outcome, prompt.grant.peer_id)
                self._reservations.release(prompt.grant, "handed off", record_sent=True)

    def _memory_quiet(self, key: Key) -> None:
        prompt = self._prompts.leaving.pop(key, None)
        if prompt is None:  # the record had already been sent when the abort came
            return
        self._memory.free(prompt.memory)
        if prompt.grant is not None:
            self._reservations.release(prompt.grant, "aborted")

    def _drop(self, unwanted: Callable[[PrefillTask], bool]) -> None:
        """Nobody waits for these any more, at whatever point of their life they are."""
        self._prompts.drop_waiting(unwanted)
        for reserving in self._prompts.reserving.values():
            reserving.cancelled |= unwanted(reserving.task)
        for prompt in [p for p in self._prompts.running if unwanted(p.task)]:
            self._prompts.running.remove(prompt)
            self._leave_aborted(prompt, "cancelled")
        for prompt in [p for p in self._prompts.leaving.values() if unwanted(p.task)]:
            self._abort(prompt, "cancelled")

    def _hand_over(self, keys: Set[Key]) -> None:
        """These are given up here; their routers place them again."""
        for task in self._prompts.tasks():
            if task.key in keys:
                self._report.failed(task, _LEAVING)
        self._drop(lambda task: task.key in keys)

    def _drop_hopeless(self) -> None:
        """A prompt whose hand-off has failed already is not computed to its end."""
        for prompt in [p for p in self._prompts.running if p.handoff is not None and p.handoff.failure is not None]:
            assert prompt.handoff is not None
            assert prompt.handoff.failure is not None
            self._prompts.running.remove(prompt)
            self._report.failed(prompt.task, prompt.handoff.failure)
            self._leave_aborted(prompt, str(prompt.handoff.failure))

    # ---- decide and act ----

    def _start_waiting(self) -> None:
        """Take memory for the next waiting prompts and ask for their reservations, a little ahead of the compute."""
        while (waiting := self._prompts.next_to_begin(self._sizes.policy, self._clock.now() - _QUICK_ANSWER_S)) is not None:
            task = waiting.task
            memory = self._memory.take(task)
            if memory is None and self._absorber.give_way():
                memory = self._memory.take(task)
            if memory is None:
                return
            self._prompts.waiting.remove(waiting)
            if task.needs_handoff:
                self._prompts.reserving[task.key] = ReservingPrompt(task, memory, self._clock.now(), waiting.came_at)
                self._reservations.reserve(task)
            else:
                self._begin(task, memory, waiting.came_at, None, None)

    def _begin(
        self, task: PrefillTask, memory: LocalMemory, came_at: int, grant: LeaseGrant | None, handoff: Handoff | None
    ) -> None:
        self._holdings.note(memory, f"lease {grant.lease_id} of {grant.peer_id} granted" if grant else "begun without a lease")
        prompt = RunningPrompt(
            *(task, memory, grant, handoff, came_at), num_computed=memory.num_cached, tokens=task.request.tokens
        )
        self._prompts.running.append(prompt)
        self._push_complete_blocks(prompt)

    def _step(self, plans: Sequence[ChunkPlan]) -> None:
        prompts = [self._prompts.running[plan.index] for plan in plans]
        started_s, interludes_s = self._clock.now(), self._interludes_s
        for prompt in prompts:
            if prompt.num_computed == prompt.memory.num_cached:
                prompt.started_s = started_s
                self._report.started(prompt.task)
                self._measured.found(prompt.task, prompt.memory.num_cached)
        between_layers = None
        if not any(prompt.task.is_interactive for prompt in prompts):
            num_tokens = sum(plan.num_tokens for plan in plans)
            suspended = {prompt.task.key for prompt in prompts}
            between_layers = self._between_layers(suspended, num_tokens_between_layers(num_tokens, self._sizes.policy))
        try:
            first_tokens = self._chunk_step.run(prompts, plans, between_layers)
        except Exception:  # the step ends here, and with it these prompts only: the worker goes on
            logger.exception("a prefill step over %d prompts failed", len(prompts))
            for prompt in prompts:
                self._prompts.running.remove(prompt)
                self._report.failed(prompt.task, HandoffError("prefill failed on this worker; see its log"))
                self._leave_aborted(prompt, "prefill failed")
            return
        self._step_s = self._clock.now() - started_s - (self._interludes_s - interludes_s)
        self._sizes.computed(sum(plan.num_tokens for plan in plans), self._step_s)
        self._measured.step(self._step_s, [(prompt.task, plan.num_tokens) for prompt, plan in zip(prompts, plans, strict=True)])
        self._busy_s += self._step_s
        self.waste.computed(prompt.task.key for prompt in prompts)
        self._settle(prompts, plans, first_tokens)

    def _between_layers(self, suspended: Set[Key], num_left: float) -> Callable[[], None]:
        """What to do between two layers of a step that is in no hurry: interactive prompts that have come are computed there,
        `num_left` tokens of them at most. So they wait for a layer rather than for a step. suspended: whose step it is."""

        def receive(wait_s: float) -> None:
            for message in self._mail.take_during_step(self.inbox, wait_s, suspended):
                self._obey(message)

        def compute_newcomers() -> None:
            nonlocal num_left
            started_s = self._clock.now()
            while not self._mail.is_held_up:
                receive(0.0)
                self._start_waiting()
                if self._prompts.awaits_answer(self._clock.now() - _QUICK_ANSWER_S):
                    receive(_BETWEEN_LAYERS_S)
                chunks = plan_between_layers(self._prompts.works(), self._sizes.policy, num_left)
                if not chunks:
                    break
                self._step(chunks)
                num_left -= sum(chunk.num_tokens for chunk in chunks)
            self._interludes_s += self._clock.now() - started_s

        return compute_newcomers

    # ---- settle ----

    def _settle(
        self, prompts: Sequence[RunningPrompt], plans: Sequence[ChunkPlan], first_tokens: Sequence[Drawn | TandemError]
    ) -> None:
        compute_done_s = self._clock.now()
        drawn = iter(first_tokens)
        for prompt, plan in zip(prompts, plans, strict=True):
            prompt.num_computed += plan.num_tokens
            self._prompts.num_computed_tokens += plan.num_tokens
            if plan.is_last:
                self._prompts.running.remove(prompt)
                self._complete(prompt, next(drawn), compute_done_s)
            else:
                self._push_complete_blocks(prompt)
                self._memory.computed(prompt.memory, prompt.num_computed)

    def _push_complete_blocks(self, prompt: RunningPrompt) -> None:
        complete_blocks = prompt.num_computed // self._engine.block_size_tokens
        if prompt.handoff is not None and complete_blocks > prompt.num_pushed_blocks:
            prompt.handoff.push_kv(prompt.num_pushed_blocks, complete_blocks)
            prompt.num_pushed_blocks = complete_blocks

    def _complete(self, prompt: RunningPrompt, drawn: Drawn | TandemError, compute_done_s: float) -> None:
        if isinstance(drawn, TandemError):
            self._report.failed(prompt.task, drawn)
            self._leave_aborted(prompt, str(drawn))
            return
        request = prompt.task.request
        finish = request.stop.finish_reason(len(request.generated) + 1, drawn.token)
        self._report.first_token(prompt, drawn, finish, compute_done_s)
        self._traced.first_token(prompt)
        if finish is not None or prompt.handoff is None:
            self._memory.computed(prompt.memory, prompt.num_computed)
            self._leave_aborted(prompt, "the first token ended the answer")
            return
        self._prompts.leaving[prompt.task.key] = prompt
        prompt.handoff.finish(
            num_positions=len(prompt.tokens),
            first_token=drawn.token,
            compute_done_s=compute_done_s,
            on_done=lambda outcome: self.inbox.put(HandoffEnded(prompt.task.key, outcome)),
        )
        self._memory.computed(prompt.memory, prompt.num_computed)  # only now: the hand-off goes first

    def _leave_aborted(self, prompt: RunningPrompt, reason: str) -> None:
        """The prompt is no longer computed and will not be handed off: wait for quiet, then free both sides."""
        if prompt.handoff is None:
            self._memory.free(prompt.memory)
            return
        self._prompts.leaving[prompt.task.key] = prompt
        self._abort(prompt, reason)

    def _abort(self, prompt: RunningPrompt, reason: str) -> None:
        assert prompt.handoff is not None, "only prompts with a hand-off leave"
        if prompt.aborting:
            return
        prompt.aborting = True
        self._holdings.note(prompt.memory, f"aborted ({reason})")
        logger.debug("hand-off of %s aborted: %s", prompt.task.request.request_id, reason)
        prompt.handoff.abort(lambda: self.inbox.put(MemoryQuiet(prompt.task.key)))

    def pool_mismatches(self) -> list[str]:
        """What is not free although nothing is held. Means something between two turns of an idle loop only."""
        return self._memory.mismatches()

    def _check_pools(self) -> None:
        """Invariant: an idle worker holds nothing."""
        self._watch.look_if_due(self._memory.standing, self.pool_mismatches)
