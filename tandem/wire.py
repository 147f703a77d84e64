"""Between the request vocabulary and the internal protos. What arrives is checked before it is believed."""

from __future__ import annotations

import math

from tandem.errors import HandoffError, InvalidRequest, TandemError
from tandem.request import Request, SamplingParams, ServiceClass, StopRules
from tandem.v1 import worker_pb2 as pb

__all__ = ["failure_to_wire", "request_from_wire", "request_to_wire"]


def request_to_wire(request: Request, attempt: int, router_id: str) -> pb.WireRequest:
    return pb.WireRequest(
        request_id=request.request_id,
        attempt=attempt,
        prompt=request.prompt,
        generated=request.generated,
        sampling=pb.WireSampling(
            temperature=request.sampling.temperature,
            top_p=request.sampling.top_p,
            top_k=request.sampling.top_k,
            seed=request.sampling.seed,
        ),
        max_new_tokens=request.stop.max_new_tokens,
        stop_token_ids=sorted(request.stop.stop_token_ids),
        service_class=request.service_class.value,
        router_id=router_id,
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
    for name, ids in (("prompt", wire.prompt), ("generated", wire.generated), ("stop_token_ids", wire.stop_token_ids)):
        _require(not ids or (min(ids) >= 0 and max(ids) < vocab_size), name, f"a token id is outside 0 … {vocab_size - 1}")
    sampling = wire.sampling
    _require(
        math.isfinite(sampling.temperature) and sampling.temperature >= 0, "temperature", "must be finite and not negative"
    )
    _require(0 < sampling.top_p <= 1, "top_p", "must be in (0, 1]")
    _require(sampling.top_k >= 0, "top_k", "must not be negative")
    classes = {c.value: c for c in ServiceClass}
    _require(wire.service_class in classes, "service_class", "is unknown")
    request = Request(
        request_id=wire.request_id,
        prompt=tuple(wire.prompt),
        generated=tuple(wire.generated),
        sampling=SamplingParams(sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed),
        stop=StopRules(wire.max_new_tokens, frozenset(wire.stop_token_ids)),
        service_class=classes[wire.service_class],
    )
    _require(
        request.max_total_tokens <= max_context_tokens, "max_new_tokens", f"exceeds the context of {max_context_tokens} tokens"
    )
    return request


def failure_to_wire(request_id: str, attempt: int, error: TandemError) -> pb.AttemptFailed:
    """Hand-off errors are worth another attempt; a request error is final."""
    return pb.AttemptFailed(
        request_id=request_id,
        attempt=attempt,
        kind=type(error).__name__,
        reason=str(error),
        retryable=isinstance(error, HandoffError),
    )


def _require(condition: bool, field: str, reason: str) -> None:
    if not condition:
        raise InvalidRequest(field, reason)
