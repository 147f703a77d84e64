"""Errors of a request as gRPC's statuses."""

from __future__ import annotations

import grpc

from tandem.errors import Cancelled, InvalidRequest, Overloaded, RequestError, Unauthenticated, Unavailable

__all__ = ["status_of_error"]

_STATUS: tuple[tuple[type[BaseException], grpc.StatusCode], ...] = (
    (InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
    (Unauthenticated, grpc.StatusCode.UNAUTHENTICATED),
    (Overloaded, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (Unavailable, grpc.StatusCode.UNAVAILABLE),
    (Cancelled, grpc.StatusCode.CANCELLED),
    (TimeoutError, grpc.StatusCode.DEADLINE_EXCEEDED),
)


def status_of_error(error: RequestError | TimeoutError) -> tuple[grpc.StatusCode, str]:
    """A code and what to tell."""
    code = next(code for kind, code in _STATUS if isinstance(error, kind))
    return code, str(error) or "the deadline passed"
