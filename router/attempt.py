"""One attempt to serve a request: a task for one prefill worker, then tokens from one decode worker."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from router.answer import Answer
from router.assembly import TokenAssembler
from router.events import AttemptEvent, Failed, FirstToken, PrefillStarted, Ready, Standing, Tokens
from router.worker import WorkerHandle
from tandem.clock import Clock
from tandem.config import RouterConfig
from tandem.errors import HandoffError
from tandem.patience import Patience
from tandem.request import FinishReason, Request, SamplingParams, StopRules, Timings, TokenLogprobs

__all__ = ["Attempt", "AttemptEnded", "Hooks"]

log = logging.getLogger(__name__)


class AttemptEnded(HandoffError):
    """A worker ended the attempt. When it is retryable the request is placed again, with the tokens so far."""

    def __init__(self, failure: Failed) -> None:
        super().__init__(f"{failure.kind} at {failure.worker_id}: {failure.reason}")
        self.failure = failure


@dataclass(frozen=True, slots=True)
class Hooks:
    """Who wants to know. gap: (seconds, number of tokens) that came so long after those before, of an earlier attempt too.
    handed_off: exposed seconds."""

    gap: Callable[[float, int], None] = lambda seconds, num_tokens: None
    handed_off: Callable[[float], None] = lambda seconds: None


class Attempt:
    """Both workers' events go through one queue. Tokens go to the answer by index, so it does not matter which worker's message
    comes first. `start` and `stop` are a pair; `stop` is due on every path.

    workers: prefill and decode; the same one where the decode worker computes the prompt. absorber: a prefill worker that may
    absorb the answer; None: there is none.

    ready: the decode worker has verified the hand-off. cached_tokens: of the prompt, not computed again. config: how long
    silence about the attempt is believed to be work.
    """

    def __init__(
        self,
        request: Request,
        number: int,
        workers: tuple[WorkerHandle, WorkerHandle],
        answer: Answer,
        clock: Clock,
        config: RouterConfig,
        hooks: Hooks = Hooks(),
        absorber: WorkerHandle | None = None,
    ) -> None:
        prefill, decode = workers
        self.key = (request.request_id, number)
        self.prefill_id = prefill.info.id
        self.decode_id = decode.info.id
        self.num_prompt_tokens = len(request.tokens)
        self.first_token_seen = False
        self.ready = False
        self.handoff_exposed_s = 0.0
        self.cached_tokens = 0
        self.is_local = prefill is decode
        self._absorber = absorber
        self._request = request
        self._prefill = prefill
        self._decode = decode
        self._answer = answer
        self._clock = clock
        self._config = config
        self._hooks = hooks
        self._assembler: TokenAssembler[tuple[int, TokenLogprobs | None]] = TokenAssembler(len(request.generated))
        self._events: asyncio.Queue[AttemptEvent] = asyncio.Queue()
        self._ended_by_worker = False

    def start(self) -> None:
        for worker in self._workers:
            worker.subscribe(self.key, self._events.put_nowait)
        self._prefill.submit(self._request, self.key[1], self.decode_id)

    def stop(self) -> None:
        """Hear no more. Unless a worker itself ended the answer, both are told at once to free what the attempt holds."""
        for worker in self._workers:
            worker.unsubscribe(self.key)
            if not self._ended_by_worker:
                worker.cancel(self.key)

    def absorb(self, generated: Sequence[int]) -> None:
        """The whole answer is there: the prefill worker, if it keeps states, may keep the one after it for the next turn."""
        absorber = self._absorber
        if absorber is not None and absorber.load is not None and absorber.load.prefixes:
            request_id, prompt, stop = self.key[0], self._request.prompt, StopRules(max_new_tokens=len(generated) + 1)
            absorber.absorb(Request(request_id, prompt, SamplingParams(), stop, generated=tuple(generated)))

    async def until_first_token(self, timings: Timings) -> None:
        """A prompt may wait long in a busy worker. So whoever hears nothing asks; only who gets no answer gives up.

        Raises:
            AttemptEnded: a worker failed, does not know the task any more, or lets nothing be heard of it.
        """
        silent_s = 0.0  # in which this router ran: a pause of its own says nothing of the workers
        while not self.first_token_seen:
            try:
                async with asyncio.timeout(self._config.ask_after_s):
                    event = await self._events.get()
            except TimeoutError:
                silent_s += self._config.ask_after_s
                if silent_s >= self._config.stall_s:
                    raise self._stalled(self.prefill_id, "before the first token") from None
                self._prefill.ask(self.key)
            else:
                silent_s = 0.0
                self._take(event, timings)

    async def until_finished(self, timings: Timings) -> FinishReason:
        """
        Raises:
            AttemptEnded: a worker failed, or nothing came for too long.
        """
        try:
            async with Patience(self._config.stall_s) as patience:
                while self._answer.finish_reason is None:
                    self._take(await self._events.get(), timings)
                    patience.heard()
        except TimeoutError:
            raise self._stalled(self.decode_id, "after the first token") from None
        return self._answer.finish_reason

    def _take(self, event: AttemptEvent, timings: Timings) -> None:
        now = self._clock.now()
        match event:
            case PrefillStarted():
                timings.prefill_started = timings.prefill_started or now
            case FirstToken():
                self.first_token_seen = True
                timings.prefill_started = timings.prefill_started or now - event.prefill_s
                self.cached_tokens = min(event.cached_tokens, len(self._request.prompt))
                self._answer.tell_prompt(event.prompt_logprobs)
                told = (event.logprobs,) if event.logprobs else ()
                self._deliver(Tokens(event.index, (event.token,), event.finish_reason, told), timings, now)
                timings.first_token = timings.first_token or now
            case Standing():
                if not event.known and not self.first_token_seen:
                    raise AttemptEnded(Failed(self.prefill_id, "Dropped", "it does not know the task any more", retryable=True))
            case Ready():
                self.handoff_exposed_s = event.handoff_exposed_s
                if not self.is_local:
                    self._hooks.handed_off(event.handoff_exposed_s)
                self._set_ready(timings, now)
            case Tokens():
                self._set_ready(timings, now)
                self._deliver(event, timings, now)
            case Failed():
                self._fail(event)

    @property
    def _workers(self) -> tuple[WorkerHandle, ...]:
        return (self._decode,) if self.is_local else (self._prefill, self._decode)

    def _stalled(self, worker_id: str, when: str) -> AttemptEnded:
        reason = f"no word for {self._config.stall_s:g} s {when}"
        return AttemptEnded(Failed(worker_id, "Stalled", reason, retryable=True))

    def _set_ready(self, timings: Timings, now: float) -> None:
        self.ready = True
        timings.handed_off = timings.handed_off or now
        timings.decode_started = timings.decode_started or now

    def _deliver(self, event: Tokens, timings: Timings, now: float) -> None:
        drawn = list(zip_longest(event.tokens, event.logprobs[: len(event.tokens)]))
        tokens = self._assembler.add(event.index, drawn, event.finish_reason)
        self._ended_by_worker = self._ended_by_worker or self._assembler.finish_reason is not None
        if tokens and timings.newest_token:
            self._hooks.gap(now - timings.newest_token, len(tokens))
        timings.newest_token = now if tokens else timings.newest_token
        self._answer.accept(tokens, self._assembler.finish_reason)

    def _fail(self, event: Failed) -> None:
        """Once the hand-off is verified and the first token is here, the prefill worker's fate matters no more."""
        if event.worker_id == self.prefill_id != self.decode_id and self.ready and self.first_token_seen:
            log.info("request %s: prefill worker %s ended after the hand-off: %s", self.key[0], event.worker_id, event.reason)
            return
        raise AttemptEnded(event)
