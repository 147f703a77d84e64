"""What a client's trace context may be, and that tracing costs nothing where nobody wants it."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from tandem.config import RouterConfig, TracingConfig
from tandem.config_json import load
from tandem.errors import ConfigError
from tandem.otel import OtelTracer
from tandem.trace_context import NO_TRACE, TraceContext
from tandem.tracing import NO_SPAN, NO_TRACER, make_tracer, read_context
from tests.traces import TRACEPARENT, traces_of

VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER")


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, "OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    "header",
    [
        TRACEPARENT,
        TRACEPARENT.removesuffix("01") + "00",
        f" {TRACEPARENT} ",
        "cc" + TRACEPARENT.removeprefix("00") + "-what-a-later-version-adds",
    ],
)
def test_a_valid_context_is_taken_as_it_is(header: str) -> None:
    assert read_context([("other", "x"), ("traceparent", header)]) == TraceContext(header.strip())


@pytest.mark.parametrize(
    "header",
    [
        "",
        "garbage",
        TRACEPARENT.upper(),
        TRACEPARENT + "-more",
        "ff" + TRACEPARENT.removeprefix("00"),
        f"00-{'0' * 32}-b7ad6b7169203331-01",
        f"00-0af7651916cd43dd8448eb211c80319c-{'0' * 16}-01",
        TRACEPARENT[:-1],
        TRACEPARENT + "\n" + TRACEPARENT,
    ],
)
def test_a_broken_context_is_as_none(header: str) -> None:
    assert read_context([("traceparent", header), ("tracestate", "a=b")]) is NO_TRACE


def test_two_contexts_are_as_none_and_states_are_joined_within_a_bound() -> None:
    assert read_context([("traceparent", TRACEPARENT)] * 2) is NO_TRACE
    assert read_context([("traceparent", TRACEPARENT.encode())]) is NO_TRACE
    states = [("traceparent", TRACEPARENT), ("tracestate", "a=b"), ("tracestate", "c=d")]
    assert read_context(states) == TraceContext(TRACEPARENT, "a=b,c=d")
    assert read_context([("traceparent", TRACEPARENT), ("tracestate", "a" * 513)]) == TraceContext(TRACEPARENT)
    assert read_context([("tracestate", "a=b")]) is NO_TRACE


def test_without_a_wish_nothing_is_made_and_nothing_kept() -> None:
    assert make_tracer(TracingConfig(), "router", "r") is NO_TRACER
    span = NO_TRACER.start("x", NO_TRACE)
    assert span is NO_SPAN
    assert not span.context
    span.end({"a": 1})
    NO_TRACER.record("x", NO_TRACE, 0.0)
    NO_TRACER.close()


def test_without_a_wish_opentelemetry_is_not_imported() -> None:
    code = "import sys, router.main, tandem.cli.up; print([name for name in sys.modules if name.startswith('opentelemetry')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("variable", VARIABLES[:2])
def test_opentelemetrys_own_variables_turn_it_on_and_off(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "http://127.0.0.1:9")
    tracer = make_tracer(TracingConfig(), "router", "r")
    assert isinstance(tracer, OtelTracer)
    tracer.close()
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    assert make_tracer(TracingConfig("http://127.0.0.1:9"), "router", "r") is NO_TRACER
    monkeypatch.delenv("OTEL_TRACES_EXPORTER")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert make_tracer(TracingConfig("http://127.0.0.1:9"), "router", "r") is NO_TRACER


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_both_protocols_have_their_exporter_and_another_is_refused(monkeypatch: pytest.MonkeyPatch, protocol: str) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    make_tracer(TracingConfig("http://127.0.0.1:9"), "decode", "d").close()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json")
    with pytest.raises(ConfigError, match="http/json"):
        make_tracer(TracingConfig("http://127.0.0.1:9"), "decode", "d")


def test_an_endpoint_that_is_no_url_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"tracing\.otlp_endpoint: '127\.0\.0\.1:4317'"):
        load(RouterConfig, '{"tracing": {"otlp_endpoint": "127.0.0.1:4317"}}')


def test_spans_stand_under_their_parents_across_tracers_and_have_their_times() -> None:
    spans = InMemorySpanExporter()
    router, worker = OtelTracer.to_exporter(spans, "router", "r"), OtelTracer.to_exporter(spans, "decode", "d")
    request = router.start("request", TraceContext(TRACEPARENT, "vendor=1"), is_server=True)
    began_s = time.monotonic() - 2.0
    worker.record("decode", request.context, began_s, {"tokens": 3})
    request.end({"answers": 1}, error="WorkerLost")
    (trace,) = traces_of(spans.get_finished_spans())
    assert trace.trace_id in TRACEPARENT
    assert trace.parents == {"decode": "request", "request": None}
    decode, ended = spans.get_finished_spans()
    assert decode.end_time is not None
    assert decode.start_time is not None
    assert 1.9e9 < decode.end_time - decode.start_time < 2.5e9
    assert (decode.attributes or {})["tokens"] == 3
    assert ended.status.status_code is StatusCode.ERROR
    assert (ended.attributes or {})["error.type"] == "WorkerLost"
    assert request.context.tracestate == "vendor=1"


def test_a_collector_that_is_away_holds_up_neither_spans_nor_the_end() -> None:
    tracer = make_tracer(TracingConfig("http://127.0.0.1:9"), "router", "r")
    began_s = time.monotonic()
    for _ in range(100):
        tracer.start("request", NO_TRACE).end()
    assert time.monotonic() - began_s < 1.0
    tracer.close()
    assert time.monotonic() - began_s < 4.0


def test_what_has_no_parent_or_an_unwanted_one_is_not_recorded_by_workers() -> None:
    spans = InMemorySpanExporter()
    tracer = OtelTracer.to_exporter(spans, "decode", "d")
    tracer.record("decode", NO_TRACE, 0.0)
    tracer.record("decode", TraceContext(TRACEPARENT.removesuffix("01") + "00"), 0.0)
    assert spans.get_finished_spans() == ()


def test_the_name_that_the_environment_gives_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat")
    spans = InMemorySpanExporter()
    OtelTracer.to_exporter(spans, "router", "r").start("request", NO_TRACE).end()
    (span,) = spans.get_finished_spans()
    assert span.resource.attributes["service.name"] == "chat"
    assert span.resource.attributes["service.instance.id"] == "r"
