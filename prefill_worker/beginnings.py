"""How a prompt comes to be computed: accepted, given memory here, then memory at its decode worker."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Protocol

from prefill_worker.absorber import Absorber
from prefill_worker.holdings import Holdings
from prefill_worker.memory import PromptMemory
from prefill_worker.prompt import Key, LocalMemory, PrefillTask, ReservingPrompt, RunningPrompt
from prefill_worker.prompts import PromptTable
from prefill_worker.report import Reporter
from prefill_worker.scheduler import PrefillPolicy
from tandem.clock import Clock
from tandem.engine import Engine
from tandem.errors import HandoffError, Leaving, NoRoom, Overloaded, TandemError
from tandem.rate import Rate
from transfer.handoff import Handoff, LeaseGrant

__all__ = ["LEAVING", "Beginnings", "HandoffSource", "ReservationClient"]

logger = logging.getLogger(__name__)

LEAVING = Leaving("the prefill worker ends; the request goes on elsewhere")
_QUICK_ANSWER_S = 0.1


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


@dataclass(slots=True)
class Beginnings:
    """For the thread of the step loop. max_queue: prompts that may wait. is_draining: nothing new is accepted. pace: of
    reservations that found room at once."""

    engine: Engine
    prompts: PromptTable
    memory: PromptMemory
    absorber: Absorber
    handoffs: HandoffSource
    reservations: ReservationClient
    report: Reporter
    holdings: Holdings
    clock: Clock
    max_queue: int
    is_draining: bool = False
    pace: Rate = field(default_factory=lambda: Rate(0.0))

    def accept(self, task: PrefillTask) -> None:
        blocks_needed = self.engine.memory.specs.blocks_for(task.num_tokens)
        if self.prompts.knows(task.key):
            logger.warning("request %s attempt %d was placed here twice; the second is ignored", *task.key)
        elif self.is_draining:
            self.report.failed(task, LEAVING)
        elif (num_waiting := len(self.prompts.waiting)) >= self.max_queue:
            self.report.failed(task, Overloaded(f"{num_waiting} prompts wait at this prefill worker", retry_after_s=1.0))
        elif blocks_needed > self.engine.blocks.size:
            self.report.failed(
                task, NoRoom(f"the prompt needs {blocks_needed} KV blocks, this worker has {self.engine.blocks.size}")
            )
        else:
            self.prompts.wait(task)

    def start_waiting(self, policy: PrefillPolicy) -> None:
        """Take memory for the next waiting prompts and ask for their reservations, a little ahead of the compute."""
        while (waiting := self.prompts.next_to_begin(policy, self.clock.now() - _QUICK_ANSWER_S)) is not None:
            task = waiting.task
            memory = self.memory.take(task)
            if memory is None and self.absorber.give_way():
                memory = self.memory.take(task)
            if memory is None:
                return
            self.prompts.waiting.remove(waiting)
            if task.needs_handoff:
                self.prompts.reserving[task.key] = ReservingPrompt(task, memory, self.clock.now(), waiting.came_at)
                self.reservations.reserve(task)
            else:
                self._begin(task, memory, waiting.came_at, None, None)

    def is_answer_near(self) -> bool:
        """An interactive prompt's reservation was asked for a moment ago, and is not there yet."""
        return self.prompts.awaits_answer(self.clock.now() - _QUICK_ANSWER_S)

    def reservation_ended(self, key: Key, outcome: LeaseGrant | TandemError) -> None:
        reserving = self.prompts.reserving.pop(key)
        if (asked_s := self.clock.now() - reserving.asked_s) <= _QUICK_ANSWER_S:
            self.pace.note(1, asked_s)
        if isinstance(outcome, TandemError):
            self.memory.free(reserving.memory)
            if not reserving.cancelled:
                self.report.failed(reserving.task, outcome)
        elif reserving.cancelled:
            self.memory.free(reserving.memory)
            self.reservations.release(outcome, "cancelled")
        else:
            self._begin_handoff(reserving, outcome)

    def _begin_handoff(self, reserving: ReservingPrompt, grant: LeaseGrant) -> None:
        task, memory = reserving.task, reserving.memory
        try:
            handoff = self.handoffs.begin(task, grant, memory)
        except HandoffError as error:  # nothing was written under this grant
            self.memory.free(memory)
            self.reservations.release(grant, str(error))
            self.report.failed(task, error)
        else:
            self._begin(task, memory, reserving.came_at, grant, handoff)

    def _begin(
        self, task: PrefillTask, memory: LocalMemory, came_at: int, grant: LeaseGrant | None, handoff: Handoff | None
    ) -> None:
        self.holdings.note(memory, f"lease {grant.lease_id} of {grant.peer_id} granted" if grant else "begun without a lease")
        prompt = RunningPrompt(
            *(task, memory, grant, handoff, came_at), num_computed=memory.num_cached, tokens=task.request.tokens
        )
        self.prompts.running.append(prompt)
        prompt.push_complete_blocks(self.engine.block_size_tokens)
