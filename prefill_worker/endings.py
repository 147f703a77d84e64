"""How a prompt leaves: handed off, ended by its first token, given up. Its memory is free when nothing reads it any more."""

from __future__ import annotations

import logging
from collections.abc import Callable, Set
from dataclasses import dataclass

from prefill_worker.beginnings import LEAVING, ReservationClient
from prefill_worker.chunk_size import ChunkSizer
from prefill_worker.holdings import Holdings
from prefill_worker.inbox import HandoffEnded, MemoryQuiet, Message
from prefill_worker.measured import PrefillMeasures
from prefill_worker.memory import PromptMemory
from prefill_worker.prompt import Key, PrefillTask, RunningPrompt
from prefill_worker.prompts import PromptTable
from prefill_worker.report import Reporter
from prefill_worker.traced import PrefillTraces
from tandem.errors import TandemError
from tandem.request import Drawn
from transfer.handoff import HandoffResult

__all__ = ["Endings"]

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Endings:
    """For the thread of the step loop. tell: puts into the loop's inbox what the sender has to say."""

    prompts: PromptTable
    memory: PromptMemory
    reservations: ReservationClient
    report: Reporter
    holdings: Holdings
    sizes: ChunkSizer
    measured: PrefillMeasures
    traced: PrefillTraces
    tell: Callable[[Message], None]

    # ---- computed to its end ----

    def complete(self, prompt: RunningPrompt, drawn: Drawn | TandemError, compute_done_s: float) -> None:
        """The whole prompt is computed; drawn: its answer's first token, or why there is none."""
        self.prompts.running.remove(prompt)
        if isinstance(drawn, TandemError):
            self.report.failed(prompt.task, drawn)
            self._leave_aborted(prompt, str(drawn))
            return
        request = prompt.task.request
        finish = request.stop.finish_reason(len(request.generated) + 1, drawn.token)
        self.report.first_token(prompt, drawn, compute_done_s)
        self.traced.first_token(prompt)
        if finish is not None or prompt.handoff is None:
            self.memory.computed(prompt.memory, prompt.num_computed)
            self._leave_aborted(prompt, "the first token ended the answer")
            return
        self.prompts.leaving[prompt.task.key] = prompt
        prompt.handoff.finish(
            num_positions=len(prompt.tokens),
            first_token=drawn.token,
            compute_done_s=compute_done_s,
            on_done=lambda outcome: self.tell(HandoffEnded(prompt.task.key, outcome)),
        )
        self.memory.computed(prompt.memory, prompt.num_computed)  # only now: the hand-off goes first

    def handoff_ended(self, key: Key, outcome: HandoffResult | TandemError) -> None:
        prompt = self.prompts.leaving.get(key)
        if prompt is None:
            return
        if isinstance(outcome, TandemError):
            self.report.failed(prompt.task, outcome)
            self._abort(prompt, str(outcome))
            return
        del self.prompts.leaving[key]
        self.memory.free(prompt.memory)
        self.sizes.handed_off(outcome)
        self.report.handed_off(prompt.task, outcome)
        self.measured.handed_off(prompt.task, outcome, len(self.prompts.leaving) + 1)
        if prompt.grant is not None:
            self.traced.handed_off(prompt.task, outcome, prompt.grant.peer_id)
            self.reservations.release(prompt.grant, "handed off", record_sent=True)

    # ---- given up ----

    def fail(self, prompt: RunningPrompt, error: TandemError) -> None:
        """It cannot be computed to its end."""
        self.prompts.running.remove(prompt)
        self.report.failed(prompt.task, error)
        self._leave_aborted(prompt, str(error))

    def drop_hopeless(self) -> None:
        """A prompt whose hand-off has failed already is not computed to its end."""
        failures = [(p, p.handoff.failure) for p in self.prompts.running if p.handoff is not None]
        for prompt, failure in failures:
            if failure is not None:
                self.fail(prompt, failure)

    def drop(self, unwanted: Callable[[PrefillTask], bool]) -> None:
        """Nobody waits for these any more, at whatever point of their life they are."""
        self.prompts.drop_waiting(unwanted)
        for reserving in self.prompts.reserving.values():
            reserving.cancelled |= unwanted(reserving.task)
        for prompt in [p for p in self.prompts.running if unwanted(p.task)]:
            self.prompts.running.remove(prompt)
            self._leave_aborted(prompt, "cancelled")
        for prompt in [p for p in self.prompts.leaving.values() if unwanted(p.task)]:
            self._abort(prompt, "cancelled")

    def hand_over(self, keys: Set[Key]) -> None:
        """These are given up here; their routers place them again."""
        for task in self.prompts.tasks():
            if task.key in keys:
                self.report.failed(task, LEAVING)
        self.drop(lambda task: task.key in keys)

    def memory_quiet(self, key: Key) -> None:
        """The sender reads nothing of it any more."""
        prompt = self.prompts.leaving.pop(key, None)
        if prompt is None:  # the record had already been sent when the abort came
            return
        self.memory.free(prompt.memory)
        if prompt.grant is not None:
            self.reservations.release(prompt.grant, "aborted")

    def _leave_aborted(self, prompt: RunningPrompt, reason: str) -> None:
        """The prompt is no longer computed and will not be handed off: wait for quiet, then free both sides."""
        if prompt.handoff is None:
            self.memory.free(prompt.memory)
            return
        self.prompts.leaving[prompt.task.key] = prompt
        self._abort(prompt, reason)

    def _abort(self, prompt: RunningPrompt, reason: str) -> None:
        assert prompt.handoff is not None, "only prompts with a hand-off leave"
        if prompt.aborting:
            return
        prompt.aborting = True
        self.holdings.note(prompt.memory, f"aborted ({reason})")
        logger.debug("hand-off of %s aborted: %s", prompt.task.request.request_id, reason)
        prompt.handoff.abort(lambda: self.tell(MemoryQuiet(prompt.task.key)))
