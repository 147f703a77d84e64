"""The prefill worker's loop: receive, decide, act, settle. One thread owns everything in here."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence, Set

from prefill_worker.absorber import Absorber
from prefill_worker.beginnings import Beginnings, HandoffSource, ReservationClient
from prefill_worker.chunk_size import ChunkSizer
from prefill_worker.chunk_step import ChunkStep, GiveWayError
from prefill_worker.endings import Endings
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
from prefill_worker.prompt import Key, PrefillTask, RunningPrompt
from prefill_worker.prompts import PromptTable
from prefill_worker.report import Reporter
from prefill_worker.scheduler import (
    ChunkPlan,
    PrefillPolicy,
    num_tokens_within_step,
    plan_step,
    plan_within_step,
)
from prefill_worker.traced import PrefillTraces
from prefill_worker.waste import WasteCount
from tandem.cache.watch import PoolWatch
from tandem.clock import Clock
from tandem.config import PrefillConfig
from tandem.engine import Engine, engine_grammars
from tandem.errors import HandoffError, TandemError
from tandem.mailbox import Inbox, SessionHub
from tandem.measures import Measures
from tandem.request import Drawn
from tandem.tracing import NO_TRACER, Tracer
from tandem.v1 import worker_pb2 as pb

__all__ = ["PrefillLoop"]

logger = logging.getLogger(__name__)

_IDLE_WAIT_S = 1.0
# A reservation takes milliseconds, a product of a tile takes as long: the answer is worth waiting for.
_RESERVING_S = 0.01
# A prompt that was held up by another's reservation may begin after a while, and nothing tells of it.
_LOOK_S = 0.1


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
        self._report = Reporter(hub)
        self._clock = clock
        policy = PrefillPolicy(config.chunk_tokens, engine.tile_tokens, config.ageing, config.batch_share)
        self._sizes = ChunkSizer.of(policy, engine.memory.specs.block_bytes / engine.block_size_tokens)
        self._prompts = PromptTable()
        self._batch_credit = 0.0
        self._stopping = False
        self._step_s = self._busy_s = self._interludes_s = 0.0
        self.waste = WasteCount()
        self.measures = Measures()
        self._measured = PrefillMeasures(self.measures)
        self._beginnings = Beginnings(
            *(engine, self._prompts, self._memory, self._absorber, handoffs, reservations, self._report, self._holdings, clock),
            max_queue=config.max_queue,
        )
        self._endings = Endings(
            *(self._prompts, self._memory, reservations, self._report, self._holdings, self._sizes, self._measured),
            traced=PrefillTraces(tracer),
            tell=lambda message: self.inbox.put(message),  # that of the moment: another may be put in its place
        )

    def run(self) -> None:
        while not self._stopping:
            self.turn(wait_s=0.0 if self._prompts.running or self._absorber.has_work else _IDLE_WAIT_S)

    def turn(self, wait_s: float) -> None:
        """Once around. `wait_s`: how long to wait for a message when none is there."""
        self._receive(wait_s)
        self._endings.drop_hopeless()
        self._beginnings.start_waiting(self._sizes.policy)
        plan = plan_step(self._prompts.works(), self._sizes.policy, self._batch_credit)
        self._batch_credit = plan.batch_credit
        if plan.chunks:
            self._step(plan.chunks)
            self._memory.publish()
        elif self._absorber.has_work:
            self._absorber.step(self._giving_way(frozenset(), math.inf))
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
            token_seconds=self._sizes.compute_s,
            step_tokens=self._sizes.policy.chunk_tokens,
            reserve_seconds=self._beginnings.pace.seconds,
        )

    # ---- receive ----

    def _receive(self, wait_s: float) -> None:
        for message in self._mail.take(self.inbox, wait_s):
            self._obey(message)

    def _obey(self, message: Message) -> None:
        match message:
            case PrefillTask():
                self._beginnings.accept(message)
            case AbsorbAnswer(task):
                self._absorber.offer(task)
            case ReservationEnded(key, outcome):
                self._beginnings.reservation_ended(key, outcome)
            case HandoffEnded(key, outcome):
                self._endings.handoff_ended(key, outcome)
            case MemoryQuiet(key):
                self._endings.memory_quiet(key)
            case CancelTask(key):
                self.waste.dropped(key)
                self._endings.drop(lambda task: task.key == key)
            case AskTask(key, router_id):
                self._report.standing(router_id, *key, known=self._prompts.knows(key))
            case RouterGone(router_id):
                self._endings.drop(lambda task: task.router_id == router_id)
            case Drain():
                self._beginnings.is_draining = True
                self._absorber.clear()
                self._endings.hand_over({prompt.task.key for prompt in self._prompts.waiting})
            case HandOver():
                self._endings.hand_over({task.key for task in self._prompts.tasks()})
            case Stop():
                self._stopping = True

    # ---- decide and act ----

    def _step(self, plans: Sequence[ChunkPlan]) -> None:
        prompts = [self._prompts.running[plan.index] for plan in plans]
        started_s, interludes_s = self._clock.now(), self._interludes_s
        for prompt in prompts:
            if prompt.num_computed == prompt.memory.num_cached:
                prompt.started_s = started_s
                self._report.started(prompt.task)
                self._measured.found(prompt.task, prompt.memory.num_cached)
        give_way = None
        if not any(prompt.task.is_interactive for prompt in prompts):
            num_tokens = sum(plan.num_tokens for plan in plans)
            suspended = {prompt.task.key for prompt in prompts}
            give_way = self._giving_way(suspended, num_tokens_within_step(num_tokens, self._sizes.policy))
        try:
            first_tokens = self._chunk_step.run(prompts, plans, give_way)
        except GiveWayError:
            raise
        except Exception:  # the step ends here, and with it these prompts only: the worker goes on
            logger.exception("a prefill step over %d prompts failed", len(prompts))
            for prompt in prompts:
                self._endings.fail(prompt, HandoffError("prefill failed on this worker; see its log"))
            return
        self._step_s = self._clock.now() - started_s - (self._interludes_s - interludes_s)
        self._sizes.computed(sum(plan.num_tokens for plan in plans), self._step_s)
        self._measured.step(self._step_s, [(prompt.task, plan.num_tokens) for prompt, plan in zip(prompts, plans, strict=True)])
        self._busy_s += self._step_s
        self.waste.computed(prompt.task.key for prompt in prompts)
        self._settle(prompts, plans, first_tokens)

    def _giving_way(self, suspended: Set[Key], num_left: float) -> Callable[[], None]:
        """What to do several times in each layer of a step that is in no hurry: interactive prompts that have come are computed
        there, `num_left` tokens of them at most. So they wait for a part of a layer rather than for a step. suspended: whose
        step it is."""

        looked_s = -math.inf

        def receive(wait_s: float) -> bool:
            messages = self._mail.take_during_step(self.inbox, wait_s, suspended)
            for message in messages:
                self._obey(message)
            return bool(messages)

        def compute_newcomers() -> None:
            """Called some hundred times a second: without news it must cost nothing, however many prompts wait."""
            nonlocal num_left, looked_s
            is_news = self._clock.now() - looked_s > _LOOK_S
            while not self._mail.is_held_up:
                is_news = receive(0.0) or is_news
                if is_news:
                    self._beginnings.start_waiting(self._sizes.policy)
                if self._beginnings.is_answer_near():
                    is_news = receive(_RESERVING_S) or is_news
                if not is_news:
                    break
                looked_s = self._clock.now()
                chunks = plan_within_step(self._prompts.works(), self._sizes.policy, num_left)
                if not chunks:
                    break
                self._step(chunks)
                num_left -= sum(chunk.num_tokens for chunk in chunks)

        def give_way() -> None:
            started_s = self._clock.now()
            try:
                compute_newcomers()
            except Exception as error:
                raise GiveWayError from error
            self._interludes_s += self._clock.now() - started_s

        return give_way

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
                self._endings.complete(prompt, next(drawn), compute_done_s)
            else:
                prompt.push_complete_blocks(self._engine.block_size_tokens)
                self._memory.computed(prompt.memory, prompt.num_computed)

    def pool_mismatches(self) -> list[str]:
        """What is not free although nothing is held. Means something between two turns of an idle loop only."""
        return self._memory.mismatches()

    def _check_pools(self) -> None:
        """Invariant: an idle worker holds nothing."""
        self._watch.look_if_due(self._memory.standing, self.pool_mismatches)
