"""Errors of a request as gRPC's statuses."""

from __future__ import annotations

import grpc

from tandem.errors import Cancelled, InvalidRequest, Overloaded, RequestError, Unauthenticated, Unavailable

__all__ = ["RETRY_AFTER_HEADER", "retry_hint", "shortened", "status_of_error"]

RETRY_AFTER_HEADER = "retry-after-ms"
MAX_DETAIL_BYTES = 1024

_STATUS: tuple[tuple[type[BaseException], grpc.StatusCode], ...] = (
    (InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
    (Unauthenticated, grpc.StatusCode.UNAUTHENTICATED),
    (Overloaded, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (Unavailable, grpc.StatusCode.UNAVAILABLE),
    (Cancelled, grpc.StatusCode.CANCELLED),
    (TimeoutError, grpc.StatusCode.DEADLINE_EXCEEDED),
)


def status_of_error(error: RequestError | TimeoutError) -> tuple[grpc.StatusCode, str]:
    """A code and what to tell, cut to what fits a trailer."""
    code = next(code for kind, code in _STATUS if isinstance(error, kind))
    return code, shortened(str(error)) or "the deadline passed"


def shortened(text: str) -> str:
    """Errors quote what a client sent. gRPC percent-encodes them into one trailer, and a client that takes 8 KiB of them would
    see another status instead."""
    data = text.encode(errors="replace")
    return data.decode() if len(data) <= MAX_DETAIL_BYTES else data[:MAX_DETAIL_BYTES].decode(errors="ignore") + " …"


def retry_hint(error: BaseException) -> tuple[tuple[str, str], ...]:
    """Trailing metadata: when the client may come again, in milliseconds, if the error says so."""
    return ((RETRY_AFTER_HEADER, str(round(error.retry_after_s * 1000))),) if isinstance(error, Overloaded) else ()
