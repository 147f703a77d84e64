"""Between the request vocabulary and the internal protos. What arrives is checked before it is believed."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tandem.errors import HandoffError, InvalidRequest, TandemError
from tandem.grammar import check_grammar
from tandem.measures import Series
from tandem.request import (
    MAX_ALTERNATIVES,
    Drawn,
    OutputOptions,
    Request,
    SamplingParams,
    ServiceClass,
    StopRules,
    TokenLogprobs,
)
from tandem.trace_context import TraceContext
from tandem.v1 import worker_pb2 as pb

__all__ = [
    "failure_to_wire",
    "first_token_to_wire",
    "logprobs_from_wire",
    "logprobs_to_wire",
    "request_from_wire",
    "request_to_wire",
    "series_from_wire",
    "series_to_wire",
]


def request_to_wire(request: Request, attempt: int, router_id: str) -> pb.WireRequest:
    return pb.WireRequest(
        request_id=request.request_id,
        attempt=attempt,
        prompt=request.prompt,
        generated=request.generated,
        sampling=_sampling_to_wire(request.sampling),
        max_new_tokens=request.stop.max_new_tokens,
        stop_token_ids=sorted(request.stop.stop_token_ids),
        min_new_tokens=request.stop.min_new_tokens,
        service_class=request.service_class.value,
        router_id=router_id,
        logprobs=request.output.logprobs,
        prompt_logprobs=request.output.prompt_logprobs,
        grammar=request.grammar,
        grammar_after=request.grammar_after,
        traceparent=request.trace.traceparent,
        tracestate=request.trace.tracestate,
    )


def request_from_wire(wire: pb.WireRequest, vocab_size: int, max_context_tokens: int) -> Request:
    """The request as the router validated it, checked again against this worker's own limits.

    Raises:
        InvalidRequest: a field that the router's model would have refused; the peer is broken or foreign.
    """
    _require(bool(wire.request_id), "request_id", "is empty")
    _require(wire.attempt >= 1, "attempt", "must be at least 1")
    _require(len(wire.prompt) >= 1, "prompt", "has no token")
    _require(wire.max_new_tokens >= 1, "max_new_tokens", "must be at least 1")
    _require(len(wire.generated) < wire.max_new_tokens, "generated", "leaves no token to generate")
    _require(0 <= wire.min_new_tokens <= wire.max_new_tokens, "min_new_tokens", "is negative or above max_new_tokens")
    bias_ids = [entry.token for entry in wire.sampling.logit_bias]
    for name, ids in (
        ("prompt", wire.prompt),
        ("generated", wire.generated),
        ("stop_token_ids", wire.stop_token_ids),
        ("logit_bias", bias_ids),
    ):
        _require(not ids or (min(ids) >= 0 and max(ids) < vocab_size), name, f"a token id is outside 0 … {vocab_size - 1}")
    if wire.grammar:
        check_grammar(wire.grammar, "grammar")
    classes = {c.value: c for c in ServiceClass}
    _require(wire.service_class in classes, "service_class", "is unknown")
    request = Request(
        request_id=wire.request_id,
        prompt=tuple(wire.prompt),
        generated=tuple(wire.generated),
        sampling=_sampling_from_wire(wire.sampling),
        stop=StopRules(wire.max_new_tokens, frozenset(wire.stop_token_ids), wire.min_new_tokens),
        service_class=classes[wire.service_class],
        output=OutputOptions(_alternatives(wire, "logprobs"), _alternatives(wire, "prompt_logprobs")),
        grammar=wire.grammar,
        grammar_after=tuple(wire.grammar_after),
        trace=TraceContext(wire.traceparent, wire.tracestate),
    )
    _require(
        request.max_total_tokens <= max_context_tokens, "max_new_tokens", f"exceeds the context of {max_context_tokens} tokens"
    )
    return request


def logprobs_to_wire(entry: TokenLogprobs) -> pb.WireLogprobs:
    return pb.WireLogprobs(
        logprob=entry.logprob, top_tokens=[token for token, _ in entry.top], top_logprobs=[value for _, value in entry.top]
    )


def logprobs_from_wire(wire: pb.WireLogprobs) -> TokenLogprobs:
    return TokenLogprobs(wire.logprob, tuple(zip(wire.top_tokens, wire.top_logprobs, strict=False)))


def failure_to_wire(request_id: str, attempt: int, error: TandemError) -> pb.AttemptFailed:
    """Hand-off errors are worth another attempt; a request error is final."""
    return pb.AttemptFailed(
        request_id=request_id,
        attempt=attempt,
        kind=type(error).__name__,
        reason=str(error),
        retryable=isinstance(error, HandoffError),
    )


def first_token_to_wire(
    request: Request,
    attempt: int,
    drawn: Drawn,
    seconds: float,
    cached_tokens: int,
    prompt_logprobs: Sequence[TokenLogprobs],
) -> pb.FirstToken:
    """Of a prompt that took so long to compute; see `pb.FirstToken`."""
    index = len(request.generated)
    finish = request.stop.finish_reason(index + 1, drawn.token)
    return pb.FirstToken(
        request_id=request.request_id,
        attempt=attempt,
        index=index,
        token=drawn.token,
        finish_reason=finish.value if finish else "",
        prefill_seconds=seconds,
        cached_tokens=cached_tokens,
        logprobs=logprobs_to_wire(drawn.logprobs) if drawn.logprobs else None,
        prompt_logprobs=[logprobs_to_wire(entry) for entry in prompt_logprobs],
    )


def series_to_wire(series: Series) -> pb.MeasuredSeries:
    family, labels = series.key
    return pb.MeasuredSeries(family=family, labels=labels, total=series.total, counts=series.counts)


def series_from_wire(wire: pb.MeasuredSeries) -> Series:
    """Whether it is of a known family shows when it is merged."""
    return Series((wire.family, tuple(wire.labels)), wire.total, tuple(wire.counts))


def _sampling_to_wire(sampling: SamplingParams) -> pb.WireSampling:
    return pb.WireSampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=[pb.LogitBias(token=token, bias=bias) for token, bias in sampling.logit_bias],
    )


def _sampling_from_wire(wire: pb.WireSampling) -> SamplingParams:
    _require(math.isfinite(wire.temperature) and wire.temperature >= 0, "temperature", "must be finite and not negative")
    _require(0 < wire.top_p <= 1, "top_p", "must be in (0, 1]")
    _require(wire.top_k >= 0, "top_k", "must not be negative")
    _require(0 <= wire.min_p <= 1, "min_p", "must be from 0 to 1")
    _require(math.isfinite(wire.presence_penalty), "presence_penalty", "must be finite")
    _require(math.isfinite(wire.frequency_penalty), "frequency_penalty", "must be finite")
    _require(0.01 <= wire.repetition_penalty <= 10, "repetition_penalty", "must be from 0.01 to 10")
    _require(all(math.isfinite(entry.bias) for entry in wire.logit_bias), "logit_bias", "must be finite")
    return SamplingParams(
        temperature=wire.temperature,
        top_p=wire.top_p,
        top_k=wire.top_k,
        seed=wire.seed,
        min_p=wire.min_p,
        presence_penalty=wire.presence_penalty,
        frequency_penalty=wire.frequency_penalty,
        repetition_penalty=wire.repetition_penalty,
        logit_bias=tuple((entry.token, entry.bias) for entry in wire.logit_bias),
    )


def _alternatives(wire: pb.WireRequest, name: str) -> int | None:
    if not wire.HasField(name):  # type: ignore[arg-type]
        return None
    count: int = getattr(wire, name)
    _require(0 <= count <= MAX_ALTERNATIVES, name, f"must be from 0 to {MAX_ALTERNATIVES}")
    return count


def _require(condition: bool, field: str, reason: str) -> None:
    if not condition:
        raise InvalidRequest(field, reason)
