"""Traces of requests: one over router, prefill, transfer and decode. Knows no OpenTelemetry (that is `tandem.otel`), so a
process that traces nothing imports nothing of it.

A request's spans::

    the client's, if it sent a `traceparent`
    └─ tandem.request        router           from arrival to the end of the last answer
       ├─ tandem.queue       router           waits for a placement; one for each
       └─ tandem.attempt     router           from its placement until it has ended; one for each
          ├─ tandem.prefill  prefill worker   from the task's arrival to its first token
          ├─ tandem.transfer prefill worker   from the first write to the record
          └─ tandem.decode   decode worker    from the verified state to the last token

A worker's part that did not come to its end has no span: the attempt says what ended it, and where. Attributes are numbers,
ids and names of errors, never text of a prompt or an answer.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Protocol

from tandem.config import TracingConfig
from tandem.environment import traces_wanted
from tandem.errors import ConfigError
from tandem.trace_context import NO_TRACE, TraceContext

__all__ = [
    "NO_ATTRIBUTES",
    "NO_SPAN",
    "NO_TRACER",
    "Attributes",
    "Span",
    "Tracer",
    "make_tracer",
    "read_context",
    "require_tracing",
]

log = logging.getLogger(__name__)

Attributes = Mapping[str, str | int | float | bool]

NO_ATTRIBUTES: Attributes = MappingProxyType({})
# https://www.w3.org/TR/trace-context/#traceparent-header. A later version may append fields after a hyphen.
_TRACEPARENT = re.compile(r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-[0-9a-f]{2}(?P<more>-.*)?")
_MOST_STATE_CHARS = 512


class Span(Protocol):
    """Begun by `Tracer.start`, and due to be ended once."""

    @property
    def context(self) -> TraceContext:
        """Under which other spans may stand, of other processes too."""
        ...

    def end(self, attributes: Attributes = NO_ATTRIBUTES, error: str = "") -> None:
        """error: name of what went wrong; empty: nothing did."""
        ...


class Tracer(Protocol):
    """May be used from any thread; nothing waits for the spans to be sent."""

    def start(
        self, name: str, parent: TraceContext, attributes: Attributes = NO_ATTRIBUTES, *, is_server: bool = False
    ) -> Span:
        """Begin a span now. parent: `NO_TRACE` begins a new trace. is_server: it answers another system's call."""
        ...

    def record(self, name: str, parent: TraceContext, began_s: float, attributes: Attributes = NO_ATTRIBUTES) -> None:
        """A span that ends now. began_s: on CLOCK_MONOTONIC. Without a parent nothing is recorded."""
        ...

    def close(self) -> None:
        """Send what is left, for a bounded time."""
        ...


class _NoSpan:
    context = NO_TRACE

    def end(self, attributes: Attributes = NO_ATTRIBUTES, error: str = "") -> None:
        pass


class _NoTracer:
    def start(
        self, name: str, parent: TraceContext, attributes: Attributes = NO_ATTRIBUTES, *, is_server: bool = False
    ) -> Span:
        return NO_SPAN

    def record(self, name: str, parent: TraceContext, began_s: float, attributes: Attributes = NO_ATTRIBUTES) -> None:
        pass

    def close(self) -> None:
        pass


NO_SPAN: Span = _NoSpan()
NO_TRACER: Tracer = _NoTracer()


def make_tracer(tracing: TracingConfig, role: str, instance: str) -> Tracer:
    """For one process. role: router, prefill or decode. instance: its id.

    Raises:
        ConfigError: the settings ask for traces, and OpenTelemetry is not installed.
    """
    if not traces_wanted(tracing):
        return NO_TRACER
    require_tracing(tracing)
    try:
        from tandem.otel import OtelTracer
    except ImportError as error:
        log.warning("the environment asks for traces, and OpenTelemetry is not installed (%s): there are none", error)
        return NO_TRACER
    return OtelTracer.to_collector(tracing.otlp_endpoint, role, instance)


def require_tracing(tracing: TracingConfig) -> None:
    """
    Raises:
        ConfigError: the settings ask for traces, and OpenTelemetry is not installed.
    """
    if tracing.otlp_endpoint and importlib.util.find_spec("opentelemetry") is None:
        raise ConfigError("traces need OpenTelemetry: install tandem[tracing], or leave tracing.otlp_endpoint out")


def read_context(headers: Iterable[tuple[str, str | bytes]]) -> TraceContext:
    """The client's W3C trace context from gRPC metadata or HTTP headers, names in lower case. One that is broken is as none."""
    parents: list[str] = []
    states: list[str] = []
    for name, value in headers:
        if name in ("traceparent", "tracestate") and isinstance(value, str):
            (parents if name == "traceparent" else states).append(value)
    if len(parents) != 1 or (found := _TRACEPARENT.fullmatch(parents[0].strip())) is None:
        return NO_TRACE
    is_known = found["version"] != "ff" and not (found["version"] == "00" and found["more"])
    if not is_known or not int(found["trace"], 16) or not int(found["span"], 16):
        return NO_TRACE
    state = ",".join(states)
    fits = len(state) <= _MOST_STATE_CHARS and state.isascii() and state.isprintable()
    return TraceContext(parents[0].strip(), state if fits else "")
