"""A collector of traces: OTLP over gRPC, as every process of a cluster sends it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as pb_grpc

__all__ = ["CollectedSpan", "Collector", "collector"]


@dataclass(frozen=True, slots=True)
class CollectedSpan:
    """parent_id: of a root empty. service, instance: of the process that sent it. text: all of it."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    service: str
    instance: str
    text: str


@dataclass(slots=True)
class Collector(pb_grpc.TraceServiceServicer):  # type: ignore[misc]
    endpoint: str = ""
    _spans: list[CollectedSpan] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def Export(self, request: pb.ExportTraceServiceRequest, context: grpc.ServicerContext) -> pb.ExportTraceServiceResponse:
        for sent in request.resource_spans:
            who = {attribute.key: attribute.value.string_value for attribute in sent.resource.attributes}
            for scope in sent.scope_spans:
                with self._lock:
                    self._spans += [
                        CollectedSpan(
                            *(span.name, span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()),
                            *(who["service.name"], who["service.instance.id"], str(span)),
                        )
                        for span in scope.spans
                    ]
        return pb.ExportTraceServiceResponse()

    def trace(self, trace_id: str) -> list[CollectedSpan]:
        with self._lock:
            return [span for span in self._spans if span.trace_id == trace_id]


@contextlib.contextmanager
def collector() -> Iterator[Collector]:
    server = grpc.server(ThreadPoolExecutor(2))
    it = Collector()
    pb_grpc.add_TraceServiceServicer_to_server(it, server)
    it.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield it
    finally:
        server.stop(None).wait()
