"""The spans of a request that a router makes: the whole, each wait for a placement, each attempt. See `tandem.tracing`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from router.attempt import Attempt
from router.events import Failed
from router.job import Job
from tandem.request import Request
from tandem.trace_context import TraceContext
from tandem.tracing import NO_SPAN, NO_TRACER, Span, Tracer

__all__ = ["RequestTraces"]


@dataclass(frozen=True, slots=True)
class RequestTraces:
    """A job's spans are in the job; what is ended there is `NO_SPAN` again."""

    to: Tracer = NO_TRACER

    def received(self, client: TraceContext) -> Span:
        """Of the whole request, under the client's."""
        return self.to.start("tandem.request", client, is_server=True)

    @contextlib.contextmanager
    def queued(self, job: Job) -> Iterator[None]:
        """While it waits for a placement."""
        span = self.to.start("tandem.queue", job.span.context, _of(job))
        try:
            yield
        finally:
            span.end()

    def placed(self, job: Job, request: Request) -> TraceContext:
        """An attempt begins. Returns what its workers' spans stand under."""
        resumed = {"tandem.resumed_tokens": len(request.generated)}
        job.attempt_span = self.to.start("tandem.attempt", job.span.context, _of(job) | resumed)
        return job.attempt_span.context

    def attempt_over(self, job: Job, attempt: Attempt | None, failure: Failed | None) -> None:
        """Whatever ended it."""
        span, job.attempt_span = job.attempt_span, NO_SPAN
        if attempt is None or span is NO_SPAN:
            return
        attributes = {"tandem.prefill_worker": attempt.prefill_id, "tandem.decode_worker": attempt.decode_id}
        if failure is not None:
            attributes["tandem.failed_at"] = failure.worker_id
        span.end(attributes, failure.kind if failure else "")

    def ended(self, jobs: Sequence[Job], span: Span, error: str) -> None:
        """All answers to one request. error: name of what ended it before its time; empty: nothing did."""
        if span is NO_SPAN:
            return
        first = jobs[0]
        attributes: dict[str, str | int | float | bool] = {
            "tandem.request_id": first.request_id,
            "tandem.attempts": max(job.number for job in jobs),
        }
        if first.is_prepared:
            attributes |= {
                "tandem.class": first.request.service_class.value,
                "gen_ai.usage.input_tokens": len(first.request.prompt),
                "gen_ai.usage.output_tokens": sum(len(job.answer.generated) for job in jobs if job.is_prepared),
            }
        if first.timings.first_token:
            attributes["tandem.time_to_first_token_s"] = first.timings.first_token - first.timings.received
        reasons = {job.answer.finish_reason.value for job in jobs if job.is_prepared and job.answer.finish_reason}
        if reasons:
            attributes["tandem.finish_reason"] = ",".join(sorted(reasons))
        span.end(attributes, error)


def _of(job: Job) -> dict[str, str | int | float | bool]:
    return {"tandem.attempt": job.number, "tandem.answer": job.index}
