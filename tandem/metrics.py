"""Prometheus metrics of this process: one registry, read when somebody asks for it.

What the pools hold is taken from the workers' loads at that moment, so nothing is counted twice and nothing is stale. A worker
adds its own load, a router those of all workers that it knows: the same names come out, summed over each pool. So it is with
what is measured (`tandem.measures`): a worker shows its own, a router its requests' and what its workers tell it.

docs/metrics.md says what each of them means.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, product
from typing import Protocol

from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from tandem.errors import ConfigError
from tandem.measures import FAMILIES, Family, Measures, Series

__all__ = [
    "MEASURED",
    "POOLS",
    "REGISTRY",
    "REQUESTS",
    "WORKERS",
    "GaugeCollector",
    "GaugeSource",
    "Load",
    "LoadSource",
    "MeasureCollector",
    "MetricsEndpoint",
    "PoolCollector",
    "exposition",
    "serve_metrics",
]


class Load(Protocol):
    """The part of a worker's load that is shown here; of decode workers `leases` by state, and `evictions` by the way in which
    the sequences come back."""

    @property
    def queue(self) -> int: ...
    @property
    def queue_tokens(self) -> int: ...
    @property
    def running(self) -> int: ...
    @property
    def kv_blocks_used(self) -> int: ...
    @property
    def kv_blocks_total(self) -> int: ...
    @property
    def state_slots_used(self) -> int: ...
    @property
    def state_slots_total(self) -> int: ...
    @property
    def leases(self) -> Mapping[str, int]: ...
    @property
    def pool_mismatches(self) -> int: ...
    @property
    def evictions(self) -> Mapping[str, int]: ...


LoadSource = Callable[[], Iterable[tuple[str, Load]]]
"""Gives (pool, load) of each worker; pool: prefill or decode. Called from whatever thread asks for the metrics."""


class PoolCollector(Collector):
    """tandem_kv_blocks, tandem_state_slots (pool, state), tandem_worker_requests (pool, state), tandem_queue_tokens (pool),
    tandem_leases (state), tandem_pool_mismatches_total (pool), tandem_decode_evictions_total (way)."""

    def __init__(self) -> None:
        self._sources: list[LoadSource] = []

    def add(self, source: LoadSource) -> Callable[[], None]:
        """Show these too. Returns what takes them away again."""
        self._sources = [*self._sources, source]

        def remove() -> None:
            self._sources = [other for other in self._sources if other is not source]

        return remove

    def collect(self) -> Iterator[Metric]:
        blocks: Counter[tuple[str, ...]] = Counter()
        slots: Counter[tuple[str, ...]] = Counter()
        requests: Counter[tuple[str, ...]] = Counter()
        tokens: Counter[tuple[str, ...]] = Counter()
        leases: Counter[tuple[str, ...]] = Counter()
        mismatches: Counter[str] = Counter()
        evictions: Counter[str] = Counter()
        for source in self._sources:
            for pool, load in source():
                blocks[pool, "used"] += load.kv_blocks_used
                blocks[pool, "free"] += load.kv_blocks_total - load.kv_blocks_used
                slots[pool, "used"] += load.state_slots_used
                slots[pool, "free"] += load.state_slots_total - load.state_slots_used
                requests[pool, "waiting"] += load.queue
                requests[pool, "running"] += load.running
                tokens[pool,] += load.queue_tokens
                leases.update({(state,): count for state, count in load.leases.items()})
                mismatches[pool] += load.pool_mismatches
                evictions.update(load.evictions)
        yield _gauge("tandem_kv_blocks", "KV blocks of a pool of workers.", ("pool", "state"), blocks)
        yield _gauge("tandem_state_slots", "Recurrent state slots of a pool of workers.", ("pool", "state"), slots)
        yield _gauge("tandem_worker_requests", "Requests that workers of a pool hold.", ("pool", "state"), requests)
        yield _gauge("tandem_queue_tokens", "Prompt tokens that wait at workers of a pool.", ("pool",), tokens)
        yield _gauge("tandem_leases", "Reservations that hold memory of decode workers.", ("state",), leases)
        found = CounterMetricFamily(
            "tandem_pool_mismatches",
            "KV blocks and state slots that idle workers found missing; above 0 is a bug.",
            labels=("pool",),
        )
        for pool, count in sorted(mismatches.items()):
            found.add_metric((pool,), count)
        yield found
        yield _evictions(evictions)


def _evictions(counts: Mapping[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(
        "tandem_decode_evictions",
        "Running sequences that gave their memory to others, by where they come back from: host memory or prefill.",
        labels=("way",),
    )
    for way, count in sorted(counts.items()):
        family.add_metric((way,), count)
    return family


class MeasureCollector(Collector):
    """All of `tandem.measures.FAMILIES`, summed over the sources; families of which nothing is known yet are named too, and
    where something is measured, counters of which the labels' values are known are shown from 0 on."""

    def __init__(self) -> None:
        self._sources: list[Measures] = []

    def add(self, source: Measures) -> Callable[[], None]:
        """Show these too. Returns what takes them away again."""
        self._sources = [*self._sources, source]

        def remove() -> None:
            self._sources = [other for other in self._sources if other is not source]

        return remove

    def collect(self) -> Iterator[Metric]:
        sums = Measures()
        if self._sources:
            sums.merge(_ZEROS)
        for source in self._sources:
            sums.merge(source.series().values())
        by_family: dict[str, list[Series]] = {name: [] for name in FAMILIES}
        for (name, _), series in sorted(sums.series().items()):
            by_family[name].append(series)
        for name, found in by_family.items():
            yield _measured(FAMILIES[name], found)


_ZEROS = tuple(
    Series((family.name, values), 0.0)
    for family in FAMILIES.values()
    if not family.bounds and len(family.values) == len(family.labels)
    for values in product(*family.values)
)


def _measured(family: Family, found: Iterable[Series]) -> Metric:
    name = f"tandem_{family.name}"
    if not family.bounds:
        counter = CounterMetricFamily(name, family.text, labels=family.labels)
        for series in found:
            counter.add_metric(series.key[1], series.total)
        return counter
    histogram = HistogramMetricFamily(name, family.text, labels=family.labels)
    bounds = [*(str(float(bound)) for bound in family.bounds), "+Inf"]
    for series in found:
        histogram.add_metric(series.key[1], list(zip(bounds, accumulate(series.counts), strict=True)), series.total)
    return histogram


GaugeSource = Callable[[], Mapping[tuple[str, ...], int]]
"""Gives values by labels. Called from whatever thread asks for the metrics."""


class GaugeCollector(Collector):
    """One gauge that is counted when somebody asks; summed over its sources."""

    def __init__(self, name: str, text: str, labels: tuple[str, ...]) -> None:
        self._facts = (name, text, labels)
        self._sources: list[GaugeSource] = []

    def add(self, source: GaugeSource) -> Callable[[], None]:
        """Show this too. Returns what takes it away again."""
        self._sources = [*self._sources, source]

        def remove() -> None:
            self._sources = [other for other in self._sources if other is not source]

        return remove

    def collect(self) -> Iterator[Metric]:
        counts: Counter[tuple[str, ...]] = Counter()
        for source in self._sources:
            counts.update(source())
        yield _gauge(*self._facts, counts)


def _gauge(name: str, text: str, labels: tuple[str, ...], counts: Mapping[tuple[str, ...], int]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, count in sorted(counts.items()):
        family.add_metric(values, count)
    return family


@dataclass(frozen=True, slots=True)
class MetricsEndpoint:
    """address: host:port; empty: there is none. stop: ends it."""

    address: str = ""
    stop: Callable[[], None] = lambda: None


def serve_metrics(host: str, port: int) -> MetricsEndpoint:
    """`GET /metrics` of this process, without encryption, from a thread of its own; port 0: not at all; -1: any free one.

    Raises:
        ConfigError: the port cannot be had.
    """
    if not port:
        return MetricsEndpoint()
    try:
        server, thread = start_http_server(max(0, port), host, REGISTRY)
    except OSError as error:
        raise ConfigError(f"cannot serve metrics on {host}:{port} ({error}); choose another metrics_port") from error

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    shown = f"[{host}]" if ":" in host else host
    return MetricsEndpoint(f"{shown}:{server.server_port}", stop)


def exposition() -> bytes:
    """Everything in Prometheus' text format."""
    return generate_latest(REGISTRY)


REGISTRY = CollectorRegistry()
POOLS = PoolCollector()
MEASURED = MeasureCollector()
REQUESTS = GaugeCollector("tandem_requests_under_way", "Requests that this router holds now, by phase.", ("phase",))
WORKERS = GaugeCollector("tandem_workers", "Workers of a pool that this router knows.", ("pool", "state"))
for _collector in (POOLS, MEASURED, REQUESTS, WORKERS):
    REGISTRY.register(_collector)
