"""`Tracer` by OpenTelemetry: the one module that imports it, when traces are wanted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from importlib.metadata import version

from opentelemetry.context import Context
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor, SpanExporter
from opentelemetry.trace import Span as SdkSpan
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tandem.environment import otlp_protocol
from tandem.errors import ConfigError
from tandem.trace_context import TraceContext
from tandem.tracing import NO_ATTRIBUTES, Attributes, Span

__all__ = ["OtelTracer"]

_PROPAGATOR = TraceContextTextMapPropagator()
_CLOSE_S = 2.0
_NS = 1_000_000_000


class OtelTracer:
    """See `Tracer`. Spans are sampled as OTEL_TRACES_SAMPLER says, by default as their parent is, and all without one."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("tandem", version("tandem"))

    @classmethod
    def to_collector(cls, endpoint: str, role: str, instance: str) -> OtelTracer:
        """Sends batches from a thread of its own, over OTLP. endpoint: empty: as OTEL_EXPORTER_OTLP_* say, or this machine's.

        Raises:
            ConfigError: the protocol that the environment names is unknown, or its exporter is not installed.
        """
        provider = TracerProvider(resource=_resource(role, instance), shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(_exporter(endpoint)))
        return cls(provider)

    @classmethod
    def to_exporter(cls, exporter: SpanExporter, role: str, instance: str) -> OtelTracer:
        """Gives every span to `exporter` as it ends: for tests."""
        provider = TracerProvider(resource=_resource(role, instance), shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        return cls(provider)

    def start(
        self, name: str, parent: TraceContext, attributes: Attributes = NO_ATTRIBUTES, *, is_server: bool = False
    ) -> Span:
        kind = SpanKind.SERVER if is_server else SpanKind.INTERNAL
        return _OtelSpan(self._tracer.start_span(name, _context(parent), kind, attributes))

    def record(self, name: str, parent: TraceContext, began_s: float, attributes: Attributes = NO_ATTRIBUTES) -> None:
        if parent:
            began_ns = time.time_ns() - round((time.monotonic() - began_s) * _NS)
            self._tracer.start_span(name, _context(parent), SpanKind.INTERNAL, attributes, start_time=began_ns).end()

    def close(self) -> None:
        """The exporter goes on trying for longer than a process may take to end."""
        closing = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        closing.start()
        closing.join(_CLOSE_S)


class _OtelSpan:
    """See `Span`."""

    def __init__(self, span: SdkSpan) -> None:
        self._span = span

    @property
    def context(self) -> TraceContext:
        own = self._span.get_span_context()
        traceparent = f"00-{own.trace_id:032x}-{own.span_id:016x}-{own.trace_flags:02x}"
        return TraceContext(traceparent, own.trace_state.to_header())

    def end(self, attributes: Attributes = NO_ATTRIBUTES, error: str = "") -> None:
        self._span.set_attributes(attributes)
        if error:
            self._span.set_attribute("error.type", error)
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()


def _context(parent: TraceContext) -> Context:
    """Without a parent an empty one: nothing is taken from whatever else in this process uses OpenTelemetry."""
    carrier = {"traceparent": parent.traceparent, "tracestate": parent.tracestate} if parent else {}
    return _PROPAGATOR.extract(carrier, Context())


def _resource(role: str, instance: str) -> Resource:
    """What OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say goes first."""
    ours = {
        "service.name": f"tandem-{role}",
        "service.namespace": "tandem",
        "service.instance.id": instance,
        "service.version": version("tandem"),
    }
    return Resource.create(ours).merge(OTELResourceDetector().detect())


def _exporter(endpoint: str) -> SpanExporter:
    protocol = otlp_protocol()
    makers: dict[str, Callable[[str], SpanExporter]] = {"grpc": _over_grpc, "http/protobuf": _over_http}
    if protocol not in makers:
        raise ConfigError(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}; known are {', '.join(makers)}")
    try:
        return makers[protocol](endpoint)
    except ImportError as error:
        raise ConfigError(f"traces over {protocol} need another package ({error}): install tandem[tracing]") from error


def _over_grpc(endpoint: str) -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=endpoint or None)


def _over_http(endpoint: str) -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces" if endpoint else None)
