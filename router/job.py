"""What the pipeline carries along for one request, and what it hands back."""

from __future__ import annotations

from dataclasses import dataclass, field

from router.admission import Ticket
from router.answer import Answer
from router.callers import Caller
from router.events import AttemptKey
from router.retry import Retries
from tandem.request import FinishReason, Phase, Request, Timings
from tandem.tracing import NO_SPAN, Span
from tandem.v1 import inference_pb2 as pb

__all__ = ["Job", "Outcome"]


@dataclass(slots=True)
class Job:
    """One of the answers to a prompt. index: which; the first one also stands for the request until it is validated.

    Who sets what: the front door message, request_id (the client's) and caller; validate request and answer; admit ticket;
    place number (of the attempt) and attempt_span; attempts the moments in timings; whoever ends it the last phase and error.
    span: of the whole request, that all its answers share."""

    message: pb.GenerateRequest
    request_id: str
    caller: Caller
    timings: Timings
    retries: Retries
    phase: Phase = Phase.RECEIVED
    request: Request = field(init=False)
    answer: Answer = field(init=False)
    ticket: Ticket = field(init=False)
    number: int = 0
    index: int = 0
    error: BaseException | None = None
    is_prepared: bool = False
    span: Span = NO_SPAN
    attempt_span: Span = NO_SPAN

    @property
    def key(self) -> AttemptKey:
        return (self.request.request_id, self.number)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an answer ended. decode_worker: empty when the first token ended the answer. timings holds moments."""

    request_id: str
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    prefill_worker: str
    decode_worker: str
    attempts: int
    timings: Timings
    handoff_exposed_s: float
    cached_tokens: int = 0
    index: int = 0
