"""Grafana dashboards, written from the panels declared here: `python -m tools.dashboards` writes helm/tandem/dashboards.

What routers say of their requests is summed over routers; what workers tell is shown by every router, so one router's word
is taken.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["DASHBOARDS", "Dashboard", "Panel", "main", "render"]

FOLDER = Path(__file__).resolve().parent.parent / "helm" / "tandem" / "dashboards"
_COLUMNS, _WIDTH, _HEIGHT = 2, 12, 8


@dataclass(frozen=True, slots=True)
class Panel:
    """queries: PromQL by legend. unit: Grafana's name (s, short, Bps, percentunit). text: what it tells, when to worry."""

    title: str
    text: str
    unit: str
    queries: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Dashboard:
    name: str
    title: str
    panels: Sequence[Panel]


# Of one router: `of_workers` is the same at each of them.
_ONE = "max without (instance, pod, container, endpoint, job)"


def _quantiles(metric: str, labels: str = "", by: str = "") -> list[tuple[str, str]]:
    """p50, p95 and p99 of a histogram, or the p95 by one label."""
    rate = f"rate(tandem_{metric}_bucket{{{_matcher(labels)}}}[$__rate_interval])"
    if by:
        return [(f"{{{{{by}}}}}", _quantile(95, f"sum by (le, {by}) ({rate})"))]
    return [(f"p{q}", _quantile(q, f"sum by (le) ({rate})")) for q in (50, 95, 99)]


def _worker_quantiles(metric: str) -> list[tuple[str, str]]:
    rate = f"{_ONE} (rate(tandem_{metric}_bucket{{{_matcher()}}}[$__rate_interval]))"
    return [(f"p{q}", _quantile(q, f"sum by (le) ({rate})")) for q in (50, 95, 99)]


def _quantile(percent: int, rates: str) -> str:
    """Where nothing happened the quantile is NaN, which the comparison takes out."""
    return f"histogram_quantile({percent / 100}, {rates}) >= 0"


def _rate(metric: str, by: str) -> tuple[str, str]:
    return f"{{{{{by}}}}}", f"sum by ({by}) (rate(tandem_{metric}{{{_matcher()}}}[$__rate_interval]))"


def _worker_rate(metric: str, by: str) -> tuple[str, str]:
    return f"{{{{{by}}}}}", f"sum by ({by}) ({_ONE} (rate(tandem_{metric}{{{_matcher()}}}[$__rate_interval])))"


def _worker_gauge(metric: str, labels: str, by: str) -> tuple[str, str]:
    return f"{{{{{by}}}}}", f"sum by ({by}) ({_ONE} (tandem_{metric}{{{_matcher(labels)}}}))"


def _share_used(metric: str, pool: str) -> str:
    used = f'sum({_ONE} (tandem_{metric}{{{_matcher(f"""pool="{pool}",state="used" """.strip())}}}))'
    every = f'sum({_ONE} (tandem_{metric}{{{_matcher(f"""pool="{pool}" """.strip())}}}))'
    return f"{used} / ({every} > 0)"


def _matcher(labels: str = "") -> str:
    return ",".join(filter(None, ('namespace=~"$namespace"', labels)))


def _memory(pool: str) -> Panel:
    return Panel(
        "Memory in use",
        "Share of KV blocks and of state slots. Either one full refuses work, however much of the other is free.",
        "percentunit",
        [("KV blocks", _share_used("kv_blocks", pool)), ("state slots", _share_used("state_slots", pool))],
    )


def _workers(pool: str) -> Panel:
    query = f"""max by (state) (tandem_workers{{{_matcher(f'pool="{pool}"')}}})"""
    return Panel(
        "Workers", "By state, as routers know them. Lost above 0 for long: see the events.", "short", [("{{state}}", query)]
    )


DASHBOARDS = (
    Dashboard(
        "requests",
        "tandem / requests",
        (
            Panel("Requests", "Ended per second, by outcome. Failed is a bug.", "reqps", [_rate("requests_total", "outcome")]),
            Panel(
                "Under way",
                "Requests that routers hold, by phase. Queued stays above 0: a pool is short.",
                "short",
                [("{{phase}}", f"sum by (phase) (tandem_requests_under_way{{{_matcher()}}})")],
            ),
            Panel(
                "Time to first token",
                "From arrival, interactive requests.",
                "s",
                _quantiles("time_to_first_token_seconds", 'class="interactive"'),
            ),
            Panel(
                "Time to first token by prompt length, p95",
                "A bucket is named by its upper bound in tokens.",
                "s",
                _quantiles("time_to_first_token_seconds", by="prompt_bucket"),
            ),
            Panel("Queue time", "From arrival to the first computed chunk.", "s", _quantiles("request_queue_seconds")),
            Panel(
                "Queue time by class, p95",
                "Batch waits behind interactive.",
                "s",
                _quantiles("request_queue_seconds", by="class"),
            ),
            Panel(
                "Inter-token latency",
                "Between two tokens, failovers' gaps too.",
                "s",
                _quantiles("inter_token_latency_seconds"),
            ),
            Panel(
                "Inter-token latency by concurrency, p95",
                "Requests that the router holds.",
                "s",
                _quantiles("inter_token_latency_seconds", by="concurrency_bucket"),
            ),
        ),
    ),
    Dashboard(
        "prefill",
        "tandem / prefill pool",
        (
            Panel(
                "Throughput",
                "Prompt tokens computed, found in the prefix cache, and computed by decode workers (local), per second.",
                "short",
                [
                    ("computed", f"sum({_ONE} (rate(tandem_prefill_tokens_total{{{_matcher()}}}[$__rate_interval])))"),
                    ("found", f"sum({_ONE} (rate(tandem_prefix_cache_hit_tokens_total{{{_matcher()}}}[$__rate_interval])))"),
                    ("local", f"sum({_ONE} (rate(tandem_local_prefill_tokens_total{{{_matcher()}}}[$__rate_interval])))"),
                ],
            ),
            Panel(
                "Work that waits",
                "Seconds of prefill before a new prompt. Grows for minutes: the pool is short.",
                "s",
                [
                    (
                        "seconds",
                        f"""sum({_ONE} (tandem_queue_tokens{{{_matcher('pool="prefill"')}}})) / """
                        f"(sum({_ONE} (rate(tandem_prefill_tokens_total{{{_matcher()}}}[$__rate_interval]))) > 0)",
                    )
                ],
            ),
            Panel("Prefill duration", "From the first computed chunk to the first token.", "s", _quantiles("prefill_seconds")),
            Panel(
                "Prefill duration by prompt length, p95",
                "Grows within a bucket: prompts share steps.",
                "s",
                _quantiles("prefill_seconds", by="prompt_bucket"),
            ),
            Panel("Step time", "One step of at most prefill.chunk_tokens.", "s", _worker_quantiles("prefill_step_seconds")),
            Panel("Prompts at workers", "", "short", [_worker_gauge("worker_requests", 'pool="prefill"', "state")]),
            _memory("prefill"),
            _workers("prefill"),
        ),
    ),
    Dashboard(
        "decode",
        "tandem / decode pool",
        (
            Panel("Throughput", "Tokens drawn per second, by class.", "short", [_worker_rate("decode_tokens_total", "class")]),
            Panel("Step time", "Every running sequence gets one token a step.", "s", _worker_quantiles("decode_step_seconds")),
            Panel(
                "Batch size",
                "Sequences in a step. Stays at 1 while requests queue: memory is short.",
                "short",
                _worker_quantiles("decode_batch_size"),
            ),
            Panel("Sequences at workers", "", "short", [_worker_gauge("worker_requests", 'pool="decode"', "state")]),
            Panel(
                "Evictions",
                "Sequences that gave their memory to others, per second: overcommit is too high, or the pool too small.",
                "short",
                [_worker_rate("decode_evictions_total", "way")],
            ),
            _memory("decode"),
            _workers("decode"),
        ),
    ),
    Dashboard(
        "handoff",
        "tandem / hand-off",
        (
            Panel(
                "Bytes",
                "Keys and values, and recurrent state, per second. Not sent: keys and values that decode workers held already, "
                "and what they computed themselves.",
                "Bps",
                [
                    _worker_rate("transfer_bytes_total", "kind"),
                    ("held", f"sum({_ONE} (rate(tandem_transfer_held_bytes_total{{{_matcher()}}}[$__rate_interval])))"),
                    ("local", f"sum(rate(tandem_local_prefill_saved_bytes_total{{{_matcher()}}}[$__rate_interval]))"),
                ],
            ),
            Panel("Time in flight", "Mostly hidden behind compute.", "s", _worker_quantiles("transfer_seconds")),
            Panel(
                "Where prompts are computed",
                "Attempts per second: shipped from a prefill worker, or local, on the decode worker itself. "
                "A large part refused there: decode workers are fuller than routers think.",
                "reqps",
                [_rate("prompts_placed_total", "where")],
            ),
            Panel(
                "Rate of a hand-off",
                "Bytes by seconds in flight. Far below the link: another transport than you think (tandem status).",
                "Bps",
                [
                    (
                        "{{kind}}",
                        f"sum by (kind) ({_ONE} (rate(tandem_transfer_bytes_total{{{_matcher()}}}[$__rate_interval]))) / "
                        f"(sum by (kind) ({_ONE} (rate(tandem_transfer_seconds_sum{{{_matcher()}}}[$__rate_interval]))) > 0)",
                    )
                ],
            ),
            Panel("Exposed", "What a client can feel of it; one machine only.", "s", _quantiles("handoff_exposed_seconds")),
            Panel(
                "Exposed by prompt length, p95",
                "KV is proportional to the prompt, the state is not.",
                "s",
                _quantiles("handoff_exposed_seconds", by="prompt_bucket"),
            ),
            Panel(
                "Refused, by field",
                "Any field but expires_at is corruption, or a bug.",
                "short",
                [
                    (
                        "{{field}}",
                        f"sum by (field) ({_ONE} (increase(tandem_handoffs_refused_total{{{_matcher()}}}[$__rate_interval])))",
                    )
                ],
            ),
        ),
    ),
    Dashboard(
        "failures",
        "tandem / leases and failures",
        (
            Panel(
                "Leases",
                "Quarantined stays above 0: a writer does not answer.",
                "short",
                [_worker_gauge("leases", "", "state")],
            ),
            Panel(
                "Attempts that failed",
                "Nearly all are placed again, with no token lost. Any kind but Leaving grows steadily: look.",
                "short",
                [_rate("attempts_failed_total", "kind")],
            ),
            Panel(
                "Requests that were not answered",
                "Per second, by outcome.",
                "reqps",
                [
                    (
                        "{{outcome}}",
                        "sum by (outcome) (rate(tandem_requests_total"
                        f"""{{{_matcher('outcome!~"stop|length|cancelled"')}}}[$__rate_interval]))""",
                    )
                ],
            ),
            Panel("Pools that do not sum", "Above 0 is a bug.", "short", [_worker_gauge("pool_mismatches_total", "", "pool")]),
            Panel(
                "Workers not ready",
                "",
                "short",
                [("{{pool}} {{state}}", f"""max by (pool, state) (tandem_workers{{{_matcher('state!="ready"')}}})""")],
            ),
        ),
    ),
)


def render(dashboard: Dashboard) -> str:
    """Grafana's JSON."""
    source = {"type": "prometheus", "uid": "${datasource}"}
    panels = [_panel(panel, number, source) for number, panel in enumerate(dashboard.panels)]
    document = {
        "uid": f"tandem-{dashboard.name}",
        "title": dashboard.title,
        "tags": ["tandem"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_datasource_variable(), _namespace_variable(source)]},
        "panels": panels,
    }
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def _panel(panel: Panel, number: int, source: dict[str, str]) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + i), "expr": query, "legendFormat": legend, "datasource": source}
        for i, (legend, query) in enumerate(panel.queries)
    ]
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": source,
        "gridPos": {"x": number % _COLUMNS * _WIDTH, "y": number // _COLUMNS * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": targets,
    }


def _datasource_variable() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}


def _namespace_variable(source: dict[str, str]) -> dict[str, Any]:
    query = "label_values(tandem_requests_under_way, namespace)"
    # Without Kubernetes there is no such label: "all" matches its absence too.
    every = {"includeAll": True, "multi": True, "allValue": ".*", "current": {"text": "All", "value": "$__all"}}
    return {"name": "namespace", "type": "query", "query": query, "datasource": source, "refresh": 2, "sort": 1, **every}


def main() -> int:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for dashboard in DASHBOARDS:
        (FOLDER / f"{dashboard.name}.json").write_text(render(dashboard), encoding="utf-8")
    known = {f"{dashboard.name}.json" for dashboard in DASHBOARDS}
    for file in FOLDER.glob("*.json"):
        if file.name not in known:
            file.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
