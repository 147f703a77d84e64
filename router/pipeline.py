"""A request's way through the router: validate → admit → (place → prefill → decode) until it is served → finish.

Knows nothing of gRPC or HTTP: a front door gives it a GenerateRequest and reads deltas and one outcome.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from functools import partial

from router.admission import PlacementQueue
from router.answer import Answer, Delta
from router.attempt import Attempt, AttemptEnded, Hooks
from router.callers import ANYONE, Caller, Callers
from router.events import Failed
from router.job import Job, Outcome
from router.measured import RequestMeasures
from router.merge import merge
from router.model import ServedModel
from router.placement import Need
from router.retry import Retries
from router.state import WorkerTable
from router.traced import RequestTraces
from router.validation import ValidRequest, validate
from tandem.cache.names import Prefix
from tandem.clock import Clock
from tandem.config import RouterConfig
from tandem.errors import Unavailable
from tandem.measures import Measures
from tandem.request import FinishReason, Phase, Request, Timings
from tandem.trace_context import NO_TRACE, TraceContext
from tandem.tracing import NO_TRACER, Span, Tracer
from tandem.v1 import inference_pb2 as pb

__all__ = ["Pipeline"]

log = logging.getLogger(__name__)

# Texts longer than this are tokenised beside the event loop: shorter ones take less than the hop costs.
_INLINE_CHARS = 4096


class Pipeline:
    """model: the served one, None before any worker is known. observe: called once with each job when it has ended.
    callers, client_timeout_s: who may call, and how long a client that does not read is waited for; for the front doors.
    measures: where what is measured is added. tracer: of each request's trace."""

    def __init__(
        self,
        config: RouterConfig,
        table: WorkerTable,
        model: Callable[[], ServedModel | None],
        clock: Clock,
        observe: Callable[[Job], None] = lambda job: None,
        callers: Callers | None = None,
        measures: Measures | None = None,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self.callers = callers or Callers()
        self.client_timeout_s = config.client_timeout_s
        self._config = config
        self._table = table
        self._model = model
        self._clock = clock
        self._observe = observe
        self._queue = PlacementQueue(table, config.max_queue, config.queue_wait_s, config.batch_ageing_s)
        self._jobs: dict[int, Job] = {}
        self._measured = RequestMeasures(measures or Measures(), lambda: len(self._jobs))
        self._traced = RequestTraces(tracer)

    @property
    def num_by_phase(self) -> Counter[str]:
        """Requests that this router holds now."""
        return Counter(job.phase.value for job in self._jobs.values())

    async def generate(
        self,
        message: pb.GenerateRequest,
        request_id: str,
        deadline_s: float | None = None,
        caller: Caller = ANYONE,
        trace: TraceContext = NO_TRACE,
    ) -> AsyncGenerator[Delta | Outcome, None]:
        """Deltas as they come, then one outcome; of each of the n answers, told apart by their index. Closing the generator, or
        cancelling its reader, frees the workers at once.

        deadline_s: seconds from now. trace: the client's.

        Raises:
            RequestError: see `tandem.errors`. TimeoutError: the deadline passed.
        """
        until = None if deadline_s is None else asyncio.get_running_loop().time() + deadline_s
        span = self._traced.received(trace)
        jobs = [self._open(message, request_id, caller, span)]
        under_way, failure = contextlib.ExitStack(), ""
        try:
            async with asyncio.timeout_at(until):
                model, valid = await self._validate(jobs[0])
            under_way.enter_context(caller.admitted(valid.num_answers))
            jobs += [self._open(message, request_id, caller, span) for _ in range(1, valid.num_answers)]
            for index, job in enumerate(jobs):
                self._prepare(job, model, valid, index)
            async with contextlib.aclosing(merge([self._answer(job, until) for job in jobs])) as answers:
                async for item in answers:
                    yield item
        except BaseException as error:
            failure = "Cancelled" if _is_gone(error) else type(error).__name__
            for job in jobs:
                self._close(job, error)
            raise
        finally:
            under_way.close()
            self._traced.ended(jobs, span, failure)

    async def _answer(self, job: Job, until: float | None) -> AsyncGenerator[Delta | Outcome, None]:
        try:
            async with contextlib.aclosing(self._stream(job, until)) as stream:
                async for item in stream:
                    yield item
            self._close(job)
        except BaseException as error:
            self._close(job, error)
            raise

    def _open(self, message: pb.GenerateRequest, request_id: str, caller: Caller, span: Span) -> Job:
        retries = Retries(self._config.max_attempts, self._config.queue_wait_s, self._queue.retry_after_s)
        job = Job(message, request_id, caller, Timings(received=self._clock.now()), retries, span=span)
        self._jobs[id(job)] = job
        return job

    def _close(self, job: Job, error: BaseException | None = None) -> None:
        """Once it has ended, in whatever way. Twice is once."""
        if self._jobs.pop(id(job), None) is None:
            return
        if error is not None:
            job.phase, job.error = Phase.CANCELLED if _is_gone(error) else Phase.FAILED, error
        job.timings.finished = job.timings.finished or self._clock.now()
        self._measured.ended(job)
        self._observe(job)

    async def _stream(self, job: Job, until: float | None) -> AsyncGenerator[Delta | Outcome, None]:
        """Serving goes on in a task of its own, so that a client that does not read delays nobody but itself."""
        serving = asyncio.create_task(self._serve(job, until), name=f"request {job.request_id}")
        serving.add_done_callback(lambda _: job.answer.close())
        try:
            while (delta := await job.answer.read()) is not None:
                yield delta
            yield await serving
        finally:
            serving.cancel()
            await asyncio.wait([serving])
            if not serving.cancelled():
                serving.exception()  # seen: it was raised above, or nobody listens any more

    async def _serve(self, job: Job, until: float | None) -> Outcome:
        self._admit(job, until)
        async with asyncio.timeout_at(until):
            while True:
                attempt: Attempt | None = None
                failure: Failed | None = None
                try:
                    attempt = await self._place(job)
                    await self._prefill(job, attempt)
                    reason = await self._decode(job, attempt)
                    return self._finish(job, attempt, reason)
                except AttemptEnded as ended:
                    failure = ended.failure
                    self._measured.failed(failure)
                    if attempt is not None and attempt.is_local and not attempt.first_token_seen:
                        job.retries.was_refused = True
                        self._measured.local_refused()
                finally:
                    # Whatever ended the attempt, nothing of it remains: not at the workers, not in the table.
                    if attempt is not None:
                        attempt.stop()
                    self._table.release(job.key)
                    self._traced.attempt_over(job, attempt, failure)
                log.warning("request %s, attempt %d: %s: %s", job.request_id, job.number, failure.worker_id, failure.reason)
                await asyncio.sleep(job.retries.after(failure, attempt.decode_id if attempt else failure.worker_id))

    # ---- the steps ----

    async def _validate(self, job: Job) -> tuple[ServedModel, ValidRequest]:
        model = self._model()
        if model is None:
            raise Unavailable("no worker has reported its model yet; try again once the cluster is ready")
        default = self._config.max_new_tokens_default
        check = partial(validate, job.message, job.request_id, model, default, draw_seed=partial(secrets.randbits, 64))
        return model, await asyncio.to_thread(check) if _num_chars(job.message) > _INLINE_CHARS else check()

    def _prepare(self, job: Job, model: ServedModel, valid: ValidRequest, index: int) -> None:
        job.index = index
        # Ids of clients may repeat; between processes they may not.
        wire_id = f"{job.request_id}.{secrets.token_hex(4)}"
        job.request = dataclasses.replace(valid.answer_request(index), request_id=wire_id)
        job.is_prepared = True
        stops = valid.stop_strings, valid.request.stop
        job.answer = Answer(model.tokenizer.detokenizer(), *stops, index, valid.prompt, valid.chat_format)

    def _admit(self, job: Job, until: float | None) -> None:
        job.caller.require_place_in_queue(self._queue.retry_after_s)
        job.ticket = self._queue.admit(job.request.service_class, len(job.request.tokens), until)
        job.timings.queued = self._clock.now()

    async def _place(self, job: Job) -> Attempt:
        job.number += 1
        job.timings.attempts = job.number
        job.phase = Phase.QUEUED
        request = dataclasses.replace(job.request, generated=tuple(job.answer.generated))
        need = Need(
            request.request_id,
            request.max_total_tokens,
            self._prefix(request),
            request.service_class,
            num_tokens=len(request.tokens),
            is_resumed=bool(request.generated),
            was_refused=job.retries.was_refused,
        )
        tried = frozenset(job.retries.tried)
        with job.caller.queued(), self._traced.queued(job):
            placed = await self._queue.place(job.ticket, job.key, need, len(request.tokens), tried)
        prefill, decode = self._table.handle(placed.prefill_id), self._table.handle(placed.decode_id)
        if prefill is None or decode is None:
            gone = placed.prefill_id if prefill is None else placed.decode_id
            raise AttemptEnded(Failed(gone, "WorkerLost", "left before the request reached it", retryable=True))
        self._measured.placed(placed)
        hooks = Hooks(partial(self._measured.gap, job), partial(self._handed_off, job))
        if trace := self._traced.placed(job, request):
            request = dataclasses.replace(request, trace=trace)
        absorber = self._table.handle(placed.absorber_id) if placed.is_local else prefill
        return Attempt(request, job.number, (prefill, decode), job.answer, self._clock, self._config, hooks, absorber)

    def _handed_off(self, job: Job, exposed_s: float) -> None:
        self._measured.handed_off(job, exposed_s)
        self._queue.note_handoff(exposed_s)

    def _prefix(self, request: Request) -> Prefix | None:
        model = self._model()
        if model is None or self._table.prefixes.is_empty:
            return None
        return Prefix.of(model.info.fingerprint, model.info.block_size_tokens, request.tokens)

    async def _prefill(self, job: Job, attempt: Attempt) -> None:
        job.phase = Phase.PREFILLING
        placed_s, is_first = self._clock.now(), not job.timings.first_token
        attempt.start()
        await attempt.until_first_token(job.timings)
        if is_first:
            self._measured.first_token(job)
        self._table.prefill_done(job.key)
        self._queue.note_first_token(attempt.num_prompt_tokens, self._clock.now() - placed_s)

    async def _decode(self, job: Job, attempt: Attempt) -> FinishReason:
        if job.answer.finish_reason is None:
            job.phase = Phase.DECODING
        return await attempt.until_finished(job.timings)

    def _finish(self, job: Job, attempt: Attempt, reason: FinishReason) -> Outcome:
        attempt.absorb(job.answer.generated)
        job.phase = Phase.FINISHED
        job.timings.finished = self._clock.now()
        return Outcome(
            request_id=job.request_id,
            finish_reason=reason,
            prompt_tokens=len(job.request.prompt),
            completion_tokens=len(job.answer.generated),
            prefill_worker=attempt.prefill_id,
            decode_worker=attempt.decode_id if attempt.ready else "",
            attempts=job.number,
            timings=job.timings,
            handoff_exposed_s=attempt.handoff_exposed_s,
            cached_tokens=attempt.cached_tokens,
            index=job.index,
        )


def _is_gone(error: BaseException) -> bool:
    """The client has left."""
    return isinstance(error, asyncio.CancelledError | GeneratorExit)


def _num_chars(message: pb.GenerateRequest) -> int:
    """Of what takes time to check: prompts are tokenised, constraints compiled."""
    bound = _INLINE_CHARS + 1 if message.WhichOneof("constraint") else 0
    return bound + len(message.text) + sum(len(part.content) for part in message.chat.messages)
