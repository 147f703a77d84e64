"""Every request is counted once, however it ends and however many attempts it takes; latencies go to its class and bucket."""

import pytest

from router.fake_workers import Script
from tandem.config import RouterConfig
from tandem.errors import InvalidRequest, Overloaded
from tandem.v1 import inference_pb2 as pb
from tests.router.tools import Bench, prompt, says

SHORT = ("128", "1", "interactive")


def counted(bench: Bench, name: str) -> dict[tuple[str, ...], int]:
    """Observations of a histogram, or the counter, by labels."""
    return {
        labels: sum(series.counts) if series.counts else int(series.total)
        for (family, labels), series in bench.measures.series().items()
        if family == name
    }


async def test_one_answer_has_one_first_token_and_a_gap_before_each_other_token() -> None:
    bench = Bench(script=says("hi"))
    await bench.ask(prompt())
    for name in ("request_queue_seconds", "prefill_seconds", "time_to_first_token_seconds"):
        assert counted(bench, name) == {SHORT: 1}
    assert counted(bench, "inter_token_latency_seconds") == {SHORT: 2}
    assert counted(bench, "requests") == {("stop", "interactive"): 1}
    assert counted(bench, "prompt_tokens") == {("interactive",): 5}


async def test_class_and_length_are_the_requests_own() -> None:
    bench = Bench()
    await bench.ask(prompt("x" * 200, max_new_tokens=2, service_class=pb.SERVICE_CLASS_BATCH))
    assert counted(bench, "time_to_first_token_seconds") == {("512", "1", "batch"): 1}
    assert counted(bench, "requests") == {("length", "batch"): 1}


async def test_a_request_that_takes_two_attempts_is_one_request_with_one_first_token() -> None:
    bench = Bench(num_decode=2, script=Script(handoff_failures=["TransferFailed"]))
    tokens, _, outcome = await bench.ask(prompt(max_new_tokens=6))
    assert (len(tokens), outcome.attempts) == (6, 2)
    assert counted(bench, "time_to_first_token_seconds") == {SHORT: 1}
    assert counted(bench, "inter_token_latency_seconds") == {SHORT: 5}
    assert counted(bench, "attempts_failed") == {("TransferFailed",): 1}
    assert counted(bench, "requests") == {("length", "interactive"): 1}


async def test_what_a_worker_calls_an_unknown_failure_is_one_label() -> None:
    bench = Bench(num_prefill=2, script=Script(refusals={"p0": ["Weird", "Odd"], "p1": ["Weird", "Odd"]}))
    await bench.ask(prompt(max_new_tokens=1))
    assert set(counted(bench, "attempts_failed")) == {("other",)}


async def test_requests_that_get_nothing_are_counted_by_why() -> None:
    bench = Bench(config=RouterConfig(queue_wait_s=0.01), slots=0)
    with pytest.raises(InvalidRequest):
        await bench.ask(prompt(max_new_tokens=-1))
    with pytest.raises((InvalidRequest, Overloaded)):
        await bench.ask(prompt())
    assert sum(counted(bench, "requests").values()) == 2
    assert counted(bench, "requests")["refused", "interactive"] >= 1
    assert counted(bench, "time_to_first_token_seconds") == {}


async def test_a_client_that_leaves_is_counted_as_such() -> None:
    bench = Bench(script=Script(step_s=60.0))
    stream = bench.pipeline.generate(prompt(max_new_tokens=5), "test")
    await anext(stream)
    await stream.aclose()
    assert counted(bench, "requests") == {("cancelled", "interactive"): 1}
