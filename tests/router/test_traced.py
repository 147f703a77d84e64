"""A request's trace shows every wait and every attempt, what ended each, and ends with the request, however that ends."""

from __future__ import annotations

import asyncio

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from router.fake_workers import Script
from tandem.errors import InvalidRequest
from tandem.otel import OtelTracer
from tandem.trace_context import TraceContext
from tests.router.tools import Bench, collect, prompt, until
from tests.traces import TRACEPARENT, Trace, traces_of


class Traced:
    """A bench whose traces are kept."""

    def __init__(self, *bench: object, **options: object) -> None:
        self.spans = InMemorySpanExporter()
        tracer = OtelTracer.to_exporter(self.spans, "router", "r")
        self.bench = Bench(*bench, tracer=tracer, **options)  # type: ignore[arg-type]

    def trace(self) -> Trace:
        (trace,) = traces_of(self.spans.get_finished_spans())
        return trace

    def names(self) -> list[str]:
        return sorted(span.name for span in self.trace().spans)


async def test_each_attempt_has_its_span_with_what_ended_it_and_where() -> None:
    it = Traced(2, 2, Script(lost_after={"d0": 2, "d1": 2}))
    await it.bench.ask(prompt(max_new_tokens=4))  # the second attempt ends with the token that its prefill worker draws
    attempts = [span for span in it.trace().spans if span.name == "tandem.attempt"]  # in the order in which they ended
    told = [dict(span.attributes or {}) for span in attempts]
    assert [attributes["tandem.attempt"] for attributes in told] == [1, 2]
    assert {attributes["tandem.decode_worker"] for attributes in told} == {"d0", "d1"}
    assert [attributes.get("error.type") for attributes in told] == ["WorkerLost", None]
    assert told[0]["tandem.failed_at"] == told[0]["tandem.decode_worker"]
    assert [attributes["tandem.resumed_tokens"] for attributes in told] == [0, 3]
    assert [span.status.status_code for span in attempts] == [StatusCode.ERROR, StatusCode.UNSET]
    request = it.trace().attributes("tandem.request")
    assert (request["tandem.attempts"], request["gen_ai.usage.output_tokens"]) == (2, 4)
    assert it.names().count("tandem.queue") == 2


async def test_workers_are_given_the_span_of_their_attempt() -> None:
    it = Traced(script=Script(refusals={"p0": ["TransferFailed"]}))
    await collect(it.bench.pipeline, prompt(), None)
    given = [request.trace.traceparent for request, _, _ in it.bench.cluster.prefill[0].submitted]
    attempts = [span.context for span in it.trace().spans if span.name == "tandem.attempt"]
    assert len(given) == 2
    assert {parent[:-3] for parent in given} == {f"00-{c.trace_id:032x}-{c.span_id:016x}" for c in attempts}


async def test_a_refused_request_is_a_trace_of_one_span_with_the_errors_name_and_none_of_its_text() -> None:
    it = Traced()
    with pytest.raises(InvalidRequest):
        await it.bench.ask(prompt("of nobody's business", max_new_tokens=10**6))
    (span,) = it.trace().spans
    assert (span.attributes or {})["error.type"] == "InvalidRequest"
    assert "business" not in span.to_json()
    assert "max_new_tokens" not in span.to_json()


async def test_a_client_that_leaves_ends_every_span() -> None:
    it = Traced(script=Script(step_s=60.0))
    stream = it.bench.pipeline.generate(prompt(max_new_tokens=50), "test", trace=TraceContext(TRACEPARENT))
    await anext(stream)
    await stream.aclose()
    assert it.names() == ["tandem.attempt", "tandem.queue", "tandem.request"]
    assert it.trace().attributes("tandem.request")["error.type"] == "Cancelled"
    assert it.trace().trace_id in TRACEPARENT


async def test_a_deadline_that_passes_in_the_queue_ends_every_span() -> None:
    it = Traced()
    for worker in list(it.bench.cluster.by_id):
        it.bench.cluster.lose(worker)
    with pytest.raises(TimeoutError):
        await it.bench.ask(prompt(), deadline_s=0.05)
    assert it.names() == ["tandem.queue", "tandem.request"]
    assert it.trace().attributes("tandem.request")["error.type"] == "TimeoutError"


async def test_an_abort_storm_leaves_no_span_open() -> None:
    it = Traced(2, 2, Script(step_s=0.001))

    async def one(number: int) -> None:
        async with asyncio.timeout(0.002 * number):
            await it.bench.ask(prompt(max_new_tokens=20))

    ended = await asyncio.gather(*(one(number) for number in range(20)), return_exceptions=True)
    assert all(error is None or isinstance(error, TimeoutError) for error in ended)
    await until(lambda: not it.bench.cluster.num_running)
    traces = traces_of(it.spans.get_finished_spans())
    assert len(traces) == 20
    for trace in traces:
        ids = {span.context.span_id for span in trace.spans}
        assert all(span.parent is None or span.parent.span_id in ids for span in trace.spans)
        assert sum(span.name == "tandem.request" for span in trace.spans) == 1


def test_without_a_tracer_workers_are_given_no_trace() -> None:
    bench = Bench()
    asyncio.run(bench.ask(prompt()))
    assert not bench.cluster.prefill[0].submitted[0][0].trace
