"""Counters and histograms of one process, which can travel: a worker's go to its routers with its load. Pure.

What there is to measure is declared once (`FAMILIES`), with the labels and the bounds of each. A worker tells each router what
has been added since it last told it; the router adds that to its own. So sums over a pool only grow, whoever comes and goes.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

__all__ = ["ALL", "FAILURES", "FAMILIES", "LATENCY_LABELS", "OUTCOMES", "Family", "Key", "Measures", "Series"]

LATENCY_LABELS = ("prompt_bucket", "concurrency_bucket", "class")
"""Of every latency. A step of a worker serves requests of all lengths and classes; it has `ALL` there."""

ALL = "all"

_STEP_S = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_WAIT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TRANSFER_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_CLASSES = ("interactive", "batch")
OUTCOMES = ("stop", "length", "cancelled", "deadline", "refused", "overloaded", "unavailable", "failed")
# Names of errors that end an attempt, the router's own, and whatever else a worker may call one.
FAILURES = (
    *("NoRoom", "HandoffRefused", "Leaving", "Evicted", "TransferFailed", "LeaseLost", "HandoffError"),
    *("InvalidRequest", "Overloaded", "WorkerLost", "Stalled", "Dropped", "other"),
)
# On a prefill worker, from where the state travels; on the decode worker; there first, in vain.
PLACES = ("shipped", "local", "local_refused")
# Of a hand-off's record; and the record itself, and its time.
_FIELDS = (
    *("lease_id", "epoch", "nonce", "writer_id", "request_id", "attempt", "fingerprint", "layout_digest", "num_positions"),
    *("kv_bytes", "state_bytes", "first_token", "compute_done_s", "clock_id", "state_checksum", "record", "expires_at"),
)
_BATCH = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256)


@dataclass(frozen=True, slots=True)
class Family:
    """name: without `tandem_`, and for counters without `_total`. bounds: of a histogram, ascending, the bound included; empty:
    a counter. values: of each of a counter's labels, those that can be; so it is shown at 0 before the first: to Prometheus
    there is no increase from nothing to 1."""

    name: str
    text: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()
    values: tuple[tuple[str, ...], ...] = ()


FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        # The router's own, of its requests.
        Family("request_queue_seconds", "From a request's arrival to its first computed chunk.", LATENCY_LABELS, _WAIT_S),
        Family("prefill_seconds", "From a prompt's first computed chunk to its first token.", LATENCY_LABELS, _WAIT_S),
        Family("time_to_first_token_seconds", "From a request's arrival to its first token.", LATENCY_LABELS, _WAIT_S),
        Family("handoff_exposed_seconds", "From prefill's last compute to a verified state.", LATENCY_LABELS, _TRANSFER_S),
        Family("inter_token_latency_seconds", "Between two tokens of an answer.", LATENCY_LABELS, _STEP_S),
        Family("requests", "Requests that have ended.", ("outcome", "class"), values=(OUTCOMES, _CLASSES)),
        Family("prompt_tokens", "Tokens of the prompts of requests that have ended.", ("class",), values=(_CLASSES,)),
        Family("prompts_placed", "Attempts, by where the prompt is computed.", ("where",), values=(PLACES,)),
        Family("local_prefill_saved_bytes", "Keys, values and states that did not travel, being computed where wanted."),
        Family("attempts_failed", "Attempts that a worker ended; most are placed again.", ("kind",), values=(FAILURES,)),
        # Of prefill workers.
        Family("prefill_step_seconds", "One step of a prefill worker.", LATENCY_LABELS, _WAIT_S),
        Family("prefill_tokens", "Prompt tokens computed.", ("class",), values=(_CLASSES,)),
        Family("prefix_cache_hit_tokens", "Prompt tokens found, and not computed again.", ("class",), values=(_CLASSES,)),
        Family("transfer_bytes", "Bytes handed off.", ("kind",), values=(("kv", "state"),)),
        Family("transfer_held_bytes", "Bytes of keys and values that decode workers held already."),
        Family("transfer_seconds", "Time with writes of a hand-off in flight.", ("kind", *LATENCY_LABELS), _TRANSFER_S),
        # Of decode workers.
        Family("decode_step_seconds", "One step of a decode worker.", LATENCY_LABELS, _STEP_S),
        Family("local_prefill_tokens", "Prompt tokens computed by decode workers.", ("class",), values=(_CLASSES,)),
        Family("decode_batch_size", "Sequences in a step of a decode worker.", (), _BATCH),
        Family("decode_tokens", "Tokens drawn by decode workers.", ("class",), values=(_CLASSES,)),
        Family("handoffs_refused", "Hand-offs that did not match their record, by the field.", ("field",), values=(_FIELDS,)),
    )
}

Key = tuple[str, tuple[str, ...]]
"""A family's name, and the values of its labels."""


@dataclass(frozen=True, slots=True)
class Series:
    """What is known of one key. counts: of a histogram, per bucket, the rest last, not cumulative; () for a counter.
    total: sum of the observed values, or the counter."""

    key: Key
    total: float
    counts: tuple[int, ...] = ()

    def less(self, before: Series | None) -> Series:
        """What was added since `before`."""
        if before is None:
            return self
        counts = tuple(now - then for now, then in zip(self.counts, before.counts, strict=True))
        return Series(self.key, self.total - before.total, counts)

    @property
    def is_nothing(self) -> bool:
        return not self.total and not any(self.counts)


class Measures:
    """May be added to and read from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: dict[Key, float] = {}
        self._counts: dict[Key, list[int]] = {}

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Into a histogram. A value below 0 is a clock that differs, and counts as 0."""
        family, value = FAMILIES[name], max(0.0, value)
        assert len(labels) == len(family.labels), f"{name} has the labels {family.labels}"
        key = (name, labels)
        with self._lock:
            counts = self._counts.get(key)
            if counts is None:
                counts = self._counts[key] = [0] * (len(family.bounds) + 1)
            counts[bisect_left(family.bounds, value)] += 1
            self._totals[key] = self._totals.get(key, 0.0) + value

    def add(self, name: str, amount: float, *labels: str) -> None:
        """To a counter."""
        assert len(labels) == len(FAMILIES[name].labels), f"{name} has the labels {FAMILIES[name].labels}"
        key = (name, labels)
        with self._lock:
            self._totals[key] = self._totals.get(key, 0.0) + amount

    def merge(self, series: Iterable[Series]) -> None:
        """Add what another process measured. Series of a shape that this release does not know are left out."""
        with self._lock:
            for one in series:
                family = FAMILIES.get(one.key[0])
                width = len(family.bounds) + 1 if family and family.bounds else 0
                if family is None or len(one.counts) != width or len(one.key[1]) != len(family.labels):
                    continue
                self._totals[one.key] = self._totals.get(one.key, 0.0) + one.total
                if one.counts:
                    known = self._counts.setdefault(one.key, [0] * width)
                    known[:] = [a + b for a, b in zip(known, one.counts, strict=True)]

    def series(self) -> dict[Key, Series]:
        with self._lock:
            return {key: Series(key, total, tuple(self._counts.get(key, ()))) for key, total in self._totals.items()}

    def since(self, before: Mapping[Key, Series]) -> tuple[list[Series], dict[Key, Series]]:
        """What was added since `before`, and the state now."""
        now = self.series()
        added = [one.less(before.get(key)) for key, one in now.items() if one != before.get(key)]
        return [one for one in added if not one.is_nothing], now
