"""Prometheus metrics of this process: one registry, read when somebody asks for it.

What the pools hold is taken from the workers' loads at that moment, so nothing is counted twice and nothing is stale. A worker
adds its own load, a router those of all workers that it knows: the same names come out, summed over each pool.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

__all__ = ["POOLS", "REGISTRY", "Load", "LoadSource", "PoolCollector", "exposition"]


class Load(Protocol):
    """The part of a worker's load that is shown here; of decode workers `leases` by state, and `evictions` by the way in which
    the sequences come back."""

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
    """tandem_kv_blocks, tandem_state_slots (pool, state), tandem_leases (state), tandem_pool_mismatches_total (pool),
    tandem_decode_evictions_total (way)."""

    def __init__(self) -> None:
        self._sources: list[LoadSource] = []

    def add(self, source: LoadSource) -> Callable[[], None]:
        """Show these too. Returns what takes them away again."""
        self._sources = [*self._sources, source]

        def remove() -> None:
            self._sources = [other for other in self._sources if other is not source]

        return remove

    def collect(self) -> Iterator[Metric]:
        blocks: Counter[tuple[str, str]] = Counter()
        slots: Counter[tuple[str, str]] = Counter()
        leases: Counter[str] = Counter()
        mismatches: Counter[str] = Counter()
        evictions: Counter[str] = Counter()
        for source in self._sources:
            for pool, load in source():
                blocks[pool, "used"] += load.kv_blocks_used
                blocks[pool, "free"] += load.kv_blocks_total - load.kv_blocks_used
                slots[pool, "used"] += load.state_slots_used
                slots[pool, "free"] += load.state_slots_total - load.state_slots_used
                leases.update(load.leases)
                mismatches[pool] += load.pool_mismatches
                evictions.update(load.evictions)
        yield _by_pool("tandem_kv_blocks", "KV blocks of a pool of workers.", blocks)
        yield _by_pool("tandem_state_slots", "Recurrent state slots of a pool of workers.", slots)
        family = GaugeMetricFamily("tandem_leases", "Reservations at decode workers.", labels=("state",))
        for state, count in sorted(leases.items()):
            family.add_metric((state,), count)
        yield family
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


def _by_pool(name: str, text: str, counts: Mapping[tuple[str, str], int]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=("pool", "state"))
    for labels, count in sorted(counts.items()):
        family.add_metric(labels, count)
    return family


def exposition() -> bytes:
    """Everything in Prometheus' text format."""
    return generate_latest(REGISTRY)


REGISTRY = CollectorRegistry()
POOLS = PoolCollector()
REGISTRY.register(POOLS)
