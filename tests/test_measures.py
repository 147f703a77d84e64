"""What is measured: every value in one bucket, sums that only grow, deltas that lose and repeat nothing, bounded labels."""

import dataclasses
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tandem import errors
from tandem.buckets import CONCURRENCY_BUCKETS, PROMPT_BUCKETS, concurrency_bucket, prompt_bucket
from tandem.measures import ALL, FAILURES, FAMILIES, LATENCY_LABELS, OUTCOMES, Measures, Series
from tandem.metrics import MeasureCollector
from tandem.request import FinishReason
from tandem.wire import series_from_wire, series_to_wire
from transfer.record import HandoffRecord

STEP = "decode_step_seconds"
LABELS = (ALL, "4", ALL)
OBSERVED = st.lists(st.floats(0, 100, allow_nan=False), max_size=20)


def counts(measures: Measures, name: str = STEP) -> list[int]:
    return [sum(column) for column in zip(*(s.counts for s in measures.series().values() if s.key[0] == name), strict=True)]


@pytest.mark.parametrize(("tokens", "bucket"), [(0, "128"), (128, "128"), (129, "512"), (131072, "131072"), (131073, "+Inf")])
def test_a_prompt_belongs_to_the_first_bucket_that_holds_it(tokens: int, bucket: str) -> None:
    assert prompt_bucket(tokens) == bucket


@given(st.integers(0, 10**9))
def test_whatever_the_number_its_label_is_one_of_few(number: int) -> None:
    assert prompt_bucket(number) in PROMPT_BUCKETS
    assert concurrency_bucket(number) in CONCURRENCY_BUCKETS


@given(OBSERVED)
def test_every_value_is_in_one_bucket_and_in_the_sum(values: list[float]) -> None:
    measures = Measures()
    for value in values:
        measures.observe(STEP, value, *LABELS)
    assert sum(counts(measures)) == len(values)
    assert sum(series.total for series in measures.series().values()) == pytest.approx(sum(values))


def test_a_value_on_a_bound_is_within_it_and_a_clock_that_goes_back_is_0() -> None:
    measures, bounds = Measures(), FAMILIES[STEP].bounds
    measures.observe(STEP, bounds[0], *LABELS)
    measures.observe(STEP, -1.0, *LABELS)
    assert counts(measures)[0] == 2
    assert measures.series()[STEP, LABELS].total == bounds[0]


@given(st.lists(OBSERVED, max_size=5))
def test_what_is_told_in_parts_is_the_whole(parts: list[list[float]]) -> None:
    worker, router = Measures(), Measures()
    told = worker.series()
    for part in parts:
        for value in part:
            worker.observe(STEP, value, *LABELS)
        worker.add("decode_tokens", len(part), "batch")
        added, told = worker.since(told)
        router.merge(series_from_wire(series_to_wire(series)) for series in added)
    assert counts(router) == (counts(worker) if any(parts) else [])
    assert router.series().get(("decode_tokens", ("batch",)), Series(("", ()), 0.0)).total == sum(map(len, parts))
    assert worker.since(told)[0] == []


def test_what_another_release_measures_is_left_out() -> None:
    measures = Measures()
    measures.merge(
        [
            Series(("of_the_future", ()), 1.0),
            Series(("decode_tokens", ("batch", "more")), 1.0),
            Series((STEP, LABELS), 1.0, (1, 2)),
            Series(("decode_tokens", ("batch",)), 1.0, (1,)),
        ]
    )
    assert measures.series() == {}


def test_threads_lose_no_count() -> None:
    measures = Measures()

    def count() -> None:
        for _ in range(500):
            measures.add("decode_tokens", 1, "batch")

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert measures.series()["decode_tokens", ("batch",)].total == 2000


def test_latencies_have_the_labels_that_users_rely_on() -> None:
    latencies = [family for family in FAMILIES.values() if family.name.endswith("_seconds")]
    assert all(set(LATENCY_LABELS) <= set(family.labels) for family in latencies)
    assert all(list(family.bounds) == sorted(set(family.bounds)) for family in FAMILIES.values())


def test_prometheus_reads_what_is_shown_and_all_families_are_named_before_anything_is_measured() -> None:
    collector, registry = MeasureCollector(), CollectorRegistry()
    registry.register(collector)
    names = {f"tandem_{name}" for name in FAMILIES}
    assert {family.name for family in text_string_to_metric_families(generate_latest(registry).decode())} == names
    one, other = Measures(), Measures()
    for measures in (one, other):
        measures.observe(STEP, 0.012, *LABELS)
        measures.add("transfer_bytes", 7, "kv")
    collector.add(one)
    remove = collector.add(other)
    shown = {
        (sample.name, sample.labels.get("le", sample.labels.get("kind", ""))): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    }
    assert (shown["tandem_transfer_bytes_total", "kv"], shown["tandem_transfer_bytes_total", "state"]) == (14, 0)
    assert (shown["tandem_decode_step_seconds_bucket", "0.01"], shown["tandem_decode_step_seconds_bucket", "0.015"]) == (0, 2)
    assert (shown["tandem_decode_step_seconds_count", ""], shown["tandem_decode_step_seconds_bucket", "+Inf"]) == (2, 2)
    remove()
    assert b'tandem_transfer_bytes_total{kind="kv"} 7.0' in generate_latest(registry)


def test_a_first_failure_is_an_increase_because_zeros_are_shown_before_it() -> None:
    collector = MeasureCollector()
    collector.add(Measures())
    zeros = {
        (family.name, tuple(sample.labels.values())): sample.value
        for family in collector.collect()
        for sample in family.samples
    }
    assert set(zeros.values()) == {0}
    counters = [family for family in FAMILIES.values() if not family.bounds]
    assert {name for name, _ in zeros} == {f"tandem_{family.name}" for family in counters}
    assert ("tandem_requests", ("failed", "interactive")) in zeros
    assert all(len(family.values) == len(family.labels) for family in counters)


def test_the_labels_values_that_are_shown_are_those_that_can_be() -> None:
    fields = {field.name for field in dataclasses.fields(HandoffRecord)}
    assert set(FAMILIES["handoffs_refused"].values[0]) == fields | {"record", "expires_at"}
    ends = {reason.value for reason in FinishReason}
    assert ends < set(OUTCOMES)
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    handoff = {kind.__name__ for kind in kinds if issubclass(kind, errors.HandoffError)}
    assert handoff < set(FAILURES)
    assert len(set(FAILURES)) == len(FAILURES)
