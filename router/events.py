"""What workers report about one attempt to serve a request, as the pipeline sees it."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.request import FinishReason, TokenLogprobs

__all__ = ["AttemptEvent", "AttemptKey", "Failed", "FirstToken", "PrefillStarted", "Ready", "Standing", "Tokens"]

# Request id on the wire, and the number of the attempt from 1 on. Events of another attempt never reach this one.
AttemptKey = tuple[str, int]


@dataclass(frozen=True, slots=True)
class PrefillStarted:
    pass


@dataclass(frozen=True, slots=True)
class FirstToken:
    """index: of `token` in the answer. finish_reason: set when the token ends the answer, and no hand-off happens.
    cached_tokens: leading prompt tokens that were not computed again.
    logprobs, prompt_logprobs: when the request asks; those of the prompt are told by an attempt that resumes nothing only."""

    index: int
    token: int
    finish_reason: FinishReason | None = None
    prefill_s: float = 0.0
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Standing:
    """A prefill worker's answer to `ask`. known: it holds the task, at whatever point; one that it has finished it does not."""

    known: bool


@dataclass(frozen=True, slots=True)
class Ready:
    """The decode worker has verified the hand-off. handoff_exposed_s: from prefill's last compute until then."""

    handoff_exposed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Tokens:
    """index: of the first of `tokens` in the answer. logprobs: of each of them, or none."""

    index: int
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """The attempt ended at this worker. kind: name of an error class of `tandem.errors`, or "WorkerLost"."""

    worker_id: str
    kind: str
    reason: str
    retryable: bool


AttemptEvent = PrefillStarted | FirstToken | Standing | Ready | Tokens | Failed
