"""docs/metrics.md names every metric that exists, with its labels, and none that does not."""

import re
from pathlib import Path

from prometheus_client.core import CounterMetricFamily

from tandem.measures import FAMILIES
from tandem.metrics import REGISTRY

DOC = (Path(__file__).parent.parent / "docs" / "metrics.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `(tandem_\w+)` \| (\w+) \| ([^|]*) \|", DOC, re.MULTILINE)


def _shown() -> dict[str, str]:
    """Name as Prometheus shows it → type."""
    return {
        family.name + ("_total" if isinstance(family, CounterMetricFamily) else ""): family.type
        for family in REGISTRY.collect()
    }


def test_every_metric_is_described_with_its_type_and_no_other_is() -> None:
    assert {name: kind for name, kind, _ in ROWS} == _shown()
    assert len(ROWS) == len(_shown())


def test_the_labels_are_those_that_are_shown() -> None:
    described = {name: re.findall(r"`(\w+)`", labels) for name, _, labels in ROWS}
    for family in FAMILIES.values():
        name = f"tandem_{family.name}" + ("" if family.bounds else "_total")
        assert described[name] == list(family.labels)


def test_the_names_that_the_contract_gives_are_there() -> None:
    names = "request_queue_seconds prefill_seconds prefill_tokens_total time_to_first_token_seconds handoff_exposed_seconds"
    names += " transfer_bytes_total transfer_seconds decode_step_seconds decode_batch_size decode_tokens_total"
    names += " inter_token_latency_seconds requests_total kv_blocks state_slots leases prefix_cache_hit_tokens_total"
    assert {f"tandem_{name}" for name in names.split()} <= set(_shown())
