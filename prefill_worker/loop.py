"""The prefill worker's loop: receive, decide, act, settle. One thread owns everything in here."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence, Set
from typing import Protocol

from prefill_worker.absorber import Absorber
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
from prefill_worker.memory import PromptMemory
from prefill_worker.prompt import Key, LocalMemory, PrefillTask, ReservingPrompt, RunningPrompt
from prefill_worker.report import Reporter
from prefill_worker.scheduler import ChunkPlan, may_start_another, plan_chunks
from prefill_worker.waste import WasteCount
from tandem.cache.watch import PoolWatch
from tandem.clock import Clock
from tandem.config import PrefillConfig
from tandem.engine import Engine, engine_grammars
from tandem.errors import HandoffError, Leaving, NoRoom, Overloaded, TandemError
from tandem.mailbox import Inbox, SessionHub
from tandem.request import Drawn
from tandem.v1 import worker_pb2 as pb
from transfer.handoff import Handoff, HandoffResult, LeaseGrant

__all__ = ["HandoffSource", "PrefillLoop", "ReservationClient"]

logger = logging.getLogger(__name__)

_IDLE_WAIT_S = 1.0
_QUICK_ANSWER_S = 0.1
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
    ) -> None:
        self.inbox: Inbox[Message] = Inbox()
        self._holdings = Holdings(clock)
        self._watch = PoolWatch(self._holdings.history)
        self._engine = engine
        self._chunk_step = ChunkStep(engine, engine_grammars(engine))
        self._memory = PromptMemory(engine, config, self._holdings)
        self._absorber = Absorber(engine, self._memory, config.absorb_chunk_tokens, config.checkpoint_every_tokens)
        self._config = config
        self._handoffs = handoffs
        self._reservations = reservations
        self._report = Reporter(hub)
        self._clock = clock
        self._waiting: deque[PrefillTask] = deque()
        self._reserving: dict[Key, ReservingPrompt] = {}
        self._running: list[RunningPrompt] = []
        self._leaving: dict[Key, RunningPrompt] = {}
        self._stopping = False
        self._draining = False
        self._step_s = 0.0
        self.waste = WasteCount()

    def run(self) -> None:
        while not self._stopping:
            self.turn(wait_s=0.0 if self._running or self._absorber.has_work else _IDLE_WAIT_S)

    def turn(self, wait_s: float) -> None:
        """Once around. `wait_s`: how long to wait for a message when none is there."""
        self._receive(wait_s)
        self._drop_hopeless()
        self._start_waiting()
        remaining, stops = [p.num_remaining for p in self._running], [p.num_to_stop for p in self._running]
        plans = plan_chunks(remaining, self._config.chunk_tokens, stops)
        if plans:
            self._step(plans)
            self._memory.publish()
        elif self._absorber.has_work:
            self._absorber.step()
            self._memory.publish()
        elif self._is_idle:
            self._check_pools()

    def load(self) -> pb.WorkerLoad:
        """Called from the session's thread: numbers may be one step old."""
        return pb.WorkerLoad(
            queue=len(self._waiting) + len(self._reserving),
            queue_tokens=sum(t.num_tokens for t in list(self._waiting)) + sum(p.num_remaining for p in list(self._running)),
            running=len(self._running) + len(self._leaving),
            kv_blocks_used=self._memory.num_blocks_held,
            kv_blocks_total=self._engine.blocks.size,
            state_slots_used=self._engine.slots.num_used,
            state_slots_total=self._engine.slots.size,
            step_seconds=self._step_s,
            wasted_chunks=self.waste.total_chunks,
            worst_wasted_chunks=self.waste.worst_chunks,
            prefixes=self._memory.index,
            pool_mismatches=self._watch.num_missing,
        )

    # ---- receive ----

    def _receive(self, wait_s: float) -> None:
        for message in self.inbox.take(wait_s):
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
                    self._drop(lambda task, key=key: task.key == key)  # type: ignore[misc]
                case AskTask(key, router_id):
                    self._report.standing(router_id, *key, known=self._knows(key))
                case RouterGone(router_id):
                    self._drop(lambda task, router_id=router_id: task.router_id == router_id)  # type: ignore[misc]
                case Drain():
                    self._draining = True
                    self._absorber.clear()
                    self._hand_over({task.key for task in self._waiting})
                case HandOver():
                    self._hand_over({task.key for task in self._held()})
                case Stop():
                    self._stopping = True

    def _accept(self, task: PrefillTask) -> None:
        blocks_needed = self._engine.memory.specs.blocks_for(task.num_tokens)
        if self._knows(task.key):
            logger.warning("request %s attempt %d was placed here twice; the second is ignored", *task.key)
        elif self._draining:
            self._report.failed(task, _LEAVING)
        elif len(self._waiting) >= self._config.max_queue:
            self._report.failed(
                task, Overloaded(f"{len(self._waiting)} prompts wait at this prefill worker", retry_after_s=1.0)
            )
        elif blocks_needed > self._engine.blocks.size:
            self._report.failed(
                task, NoRoom(f"the prompt needs {blocks_needed} KV blocks, this worker has {self._engine.blocks.size}")
            )
        else:
            self._waiting.append(task)

    def _reservation_ended(self, key: Key, outcome: LeaseGrant | TandemError) -> None:
        reserving = self._reserving.pop(key)
        if isinstance(outcome, TandemError):
            self._memory.free(reserving.memory)
            if not reserving.cancelled:
                self._report.failed(reserving.task, outcome)
        elif reserving.cancelled:
            self._memory.free(reserving.memory)
            self._reservations.release(outcome, "cancelled")
        else:
            self._begin_handoff(reserving.task, reserving.memory, outcome)

    def _begin_handoff(self, task: PrefillTask, memory: LocalMemory, grant: LeaseGrant) -> None:
        try:
            handoff = self._handoffs.begin(task, grant, memory)
        except HandoffError as error:  # nothing was written under this grant
            self._memory.free(memory)
            self._reservations.release(grant, str(error))
            self._report.failed(task, error)
        else:
            self._begin(task, memory, grant, handoff)

    def _handoff_ended(self, key: Key, outcome: HandoffResult | TandemError) -> None:
        prompt = self._leaving.get(key)
        if prompt is None:
            return
        if isinstance(outcome, TandemError):
            self._report.failed(prompt.task, outcome)
            self._abort(prompt, str(outcome))
        else:
            del self._leaving[key]
            self._memory.free(prompt.memory)
            self._report.handed_off(prompt.task, outcome)
            if prompt.grant is not None:
                self._reservations.release(prompt.grant, "handed off", record_sent=True)

    def _memory_quiet(self, key: Key) -> None:
        prompt = self._leaving.pop(key, None)
        if prompt is None:  # the record had already been sent when the abort came
            return
        self._memory.free(prompt.memory)
        if prompt.grant is not None:
            self._reservations.release(prompt.grant, "aborted")

    def _drop(self, unwanted: Callable[[PrefillTask], bool]) -> None:
        """Nobody waits for these any more, at whatever point of their life they are."""
        self._waiting = deque(task for task in self._waiting if not unwanted(task))
        for reserving in self._reserving.values():
            reserving.cancelled |= unwanted(reserving.task)
        for prompt in [p for p in self._running if unwanted(p.task)]:
            self._running.remove(prompt)
            self._leave_aborted(prompt, "cancelled")
        for prompt in [p for p in self._leaving.values() if unwanted(p.task)]:
            self._abort(prompt, "cancelled")

    def _held(self) -> list[PrefillTask]:
        """Whatever is here, at whatever point of its life."""
        begun = [prompt.task for prompt in (*self._running, *self._leaving.values())]
        return [*self._waiting, *(reserving.task for reserving in self._reserving.values()), *begun]

    def _hand_over(self, keys: Set[Key]) -> None:
        """These are given up here; their routers place them again."""
        for task in self._held():
            if task.key in keys:
                self._report.failed(task, _LEAVING)
        self._drop(lambda task: task.key in keys)

    def _drop_hopeless(self) -> None:
        """A prompt whose hand-off has failed already is not computed to its end."""
        for prompt in [p for p in self._running if p.handoff is not None and p.handoff.failure is not None]:
            assert prompt.handoff is not None
            assert prompt.handoff.failure is not None
            self._running.remove(prompt)
            self._report.failed(prompt.task, prompt.handoff.failure)
            self._leave_aborted(prompt, str(prompt.handoff.failure))

    # ---- decide and act ----

    def _start_waiting(self) -> None:
        """Take memory for the next waiting prompts and ask for their reservations, a little ahead of the compute."""
        started = sum(p.num_remaining for p in self._running) + sum(r.num_remaining for r in self._fresh_reservations())
        while self._waiting and may_start_another(started, self._config.chunk_tokens):
            task = self._waiting[0]
            memory = self._memory.take(task)
            if memory is None and self._absorber.give_way():
                memory = self._memory.take(task)
            if memory is None:
                return
            self._waiting.popleft()
            started += task.num_tokens - memory.num_cached
            if task.needs_handoff:
                self._reserving[task.key] = ReservingPrompt(task, memory, self._clock.now())
                self._reservations.reserve(task)
            else:
                self._begin(task, memory, None, None)

    def _fresh_reservations(self) -> list[ReservingPrompt]:
        """Those that may begin at any moment. One whose decode worker is full, or does not answer, must not keep others from
        theirs."""
        since_s = self._clock.now() - _QUICK_ANSWER_S
        return [reserving for reserving in self._reserving.values() if reserving.asked_s >= since_s]

    def _begin(self, task: PrefillTask, memory: LocalMemory, grant: LeaseGrant | None, handoff: Handoff | None) -> None:
        self._holdings.note(memory, f"lease {grant.lease_id} of {grant.peer_id} granted" if grant else "begun without a lease")
        prompt = RunningPrompt(*(task, memory, grant, handoff), num_computed=memory.num_cached, tokens=task.request.tokens)
        self._running.append(prompt)
        self._push_complete_blocks(prompt)

    def _step(self, plans: Sequence[ChunkPlan]) -> None:
        prompts = [self._running[plan.index] for plan in plans]
        started_s = self._clock.now()
        for prompt in prompts:
            if prompt.num_computed == prompt.memory.num_cached:
                prompt.started_s = started_s
                self._report.started(prompt.task)
        try:
            first_tokens = self._chunk_step.run(prompts, plans)
        except Exception:  # the step ends here, and with it these prompts only: the worker goes on
            logger.exception("a prefill step over %d prompts failed", len(prompts))
            for prompt in prompts:
                self._running.remove(prompt)
                self._report.failed(prompt.task, HandoffError("prefill failed on this worker; see its log"))
                self._leave_aborted(prompt, "prefill failed")
            return
        self._step_s = self._clock.now() - started_s
        self.waste.computed(prompt.task.key for prompt in prompts)
        self._settle(prompts, plans, first_tokens)

    # ---- settle ----

    def _settle(
        self, prompts: Sequence[RunningPrompt], plans: Sequence[ChunkPlan], first_tokens: Sequence[Drawn | TandemError]
    ) -> None:
        compute_done_s = self._clock.now()
        drawn = iter(first_tokens)
        for prompt, plan in zip(prompts, plans, strict=True):
            prompt.num_computed += plan.num_tokens
            if plan.is_last:
                self._running.remove(prompt)
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
        if finish is not None or prompt.handoff is None:
            self._memory.computed(prompt.memory, prompt.num_computed)
            self._leave_aborted(prompt, "the first token ended the answer")
            return
        self._leaving[prompt.task.key] = prompt
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
        self._leaving[prompt.task.key] = prompt
        self._abort(prompt, reason)

    def _abort(self, prompt: RunningPrompt, reason: str) -> None:
        assert prompt.handoff is not None, "only prompts with a hand-off leave"
        if prompt.aborting:
            return
        prompt.aborting = True
        self._holdings.note(prompt.memory, f"aborted ({reason})")
        logger.debug("hand-off of %s aborted: %s", prompt.task.request.request_id, reason)
        prompt.handoff.abort(lambda: self.inbox.put(MemoryQuiet(prompt.task.key)))

    def _knows(self, key: Key) -> bool:
        computing = [t.key for t in self._waiting] + [p.task.key for p in self._running]
        return key in self._reserving or key in self._leaving or key in computing

    @property
    def _is_idle(self) -> bool:
        return not (self._waiting or self._reserving or self._running or self._leaving)

    def pool_mismatches(self) -> list[str]:
        """What is not free although nothing is held. Means something between two turns of an idle loop only."""
        return self._memory.mismatches()

    def _check_pools(self) -> None:
        """Invariant: an idle worker holds nothing."""
        self._watch.look(self.pool_mismatches())
