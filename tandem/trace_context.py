"""The place of a request in a trace, as it travels between processes. Pure."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["NO_TRACE", "TraceContext"]


@dataclass(frozen=True, slots=True)
class TraceContext:
    """W3C Trace Context: the span under which others stand. traceparent: `00-TRACE-SPAN-FLAGS` in hexadecimal digits; empty:
    there is none. tracestate: what other tracing systems passed along with it."""

    traceparent: str = ""
    tracestate: str = ""

    def __bool__(self) -> bool:
        return bool(self.traceparent)


NO_TRACE = TraceContext()
