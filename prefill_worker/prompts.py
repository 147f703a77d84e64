"""Every prompt of a prefill worker, by the point of its life."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from prefill_worker.prompt import Key, PrefillTask, ReservingPrompt, RunningPrompt, WaitingPrompt
from prefill_worker.scheduler import PrefillPolicy, Work, may_begin

__all__ = ["PromptTable"]


@dataclass(slots=True)
class PromptTable:
    """waiting: hold nothing. reserving: hold memory here, the decode worker was asked. running: may be computed. leaving: are
    not computed any more, their memory waits for the sender. num_computed_tokens: of all prompts since start."""

    waiting: list[WaitingPrompt] = field(default_factory=list)
    reserving: dict[Key, ReservingPrompt] = field(default_factory=dict)
    running: list[RunningPrompt] = field(default_factory=list)
    leaving: dict[Key, RunningPrompt] = field(default_factory=dict)
    num_computed_tokens: int = 0

    def wait(self, task: PrefillTask) -> None:
        self.waiting.append(WaitingPrompt(task, self.num_computed_tokens))

    def drop_waiting(self, unwanted: Callable[[PrefillTask], bool]) -> None:
        self.waiting = [prompt for prompt in self.waiting if not unwanted(prompt.task)]

    def next_to_begin(self, policy: PrefillPolicy, asked_since_s: float) -> WaitingPrompt | None:
        """The most urgent waiting prompt that should begin now. asked_since_s: reservations that were asked for earlier do not
        count as begun; a decode worker that is full, or does not answer, must not keep others from theirs."""
        begun = [self._work(prompt) for prompt in self.running]
        begun += [self._work(prompt) for prompt in self.reserving.values() if prompt.asked_s >= asked_since_s]
        ranked = sorted(self.waiting, key=lambda prompt: self._rank(prompt, policy))
        seen = set()
        for prompt in ranked:  # the first of each class speaks for it
            if prompt.task.request.service_class in seen:
                continue
            seen.add(prompt.task.request.service_class)
            if may_begin(self._work(prompt), begun, policy):
                return prompt
        return None

    def awaits_answer(self, asked_since_s: float) -> bool:
        """An interactive prompt's reservation was asked for since then, and is not there yet."""
        return any(p.task.is_interactive and p.asked_s >= asked_since_s for p in self.reserving.values())

    def works(self) -> list[Work]:
        """Of the running ones."""
        return [self._work(prompt) for prompt in self.running]

    def tasks(self) -> Iterator[PrefillTask]:
        """Whatever is here, at whatever point of its life."""
        yield from (prompt.task for prompt in self.waiting)
        yield from (prompt.task for prompt in self.reserving.values())
        yield from (prompt.task for prompt in self.running)
        yield from (prompt.task for prompt in self.leaving.values())

    def knows(self, key: Key) -> bool:
        return any(task.key == key for task in self.tasks())

    @property
    def is_empty(self) -> bool:
        return not (self.waiting or self.reserving or self.running or self.leaving)

    @property
    def num_queued_tokens(self) -> int:
        """Not yet computed. May be read from another thread."""
        return sum(p.task.num_tokens for p in list(self.waiting)) + sum(p.num_remaining for p in list(self.running))

    def oldest_wait_s(self, now_s: float) -> float:
        """How long the interactive prompt that waits longest has waited; batch ones wait as a rule. May be read from another
        thread."""
        return max((now_s - p.task.received_s for p in list(self.waiting) if p.task.is_interactive), default=0.0)

    def _rank(self, prompt: WaitingPrompt, policy: PrefillPolicy) -> tuple[bool, float]:
        work = self._work(prompt)
        return (not prompt.task.is_interactive, policy.urgency(work))

    def _work(self, prompt: WaitingPrompt | ReservingPrompt | RunningPrompt) -> Work:
        return Work(
            num_computed=prompt.num_computed,
            num_remaining=prompt.num_remaining,
            num_to_stop=prompt.num_to_stop,
            waited_tokens=self.num_computed_tokens - prompt.came_at,
            service_class=prompt.task.request.service_class,
        )
