"""Each alert fires when it should, and not when it should not: evaluated by Prometheus' own promtool, on made-up series."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.monitoring.prometheus import binary
from tests.monitoring.queries import ALERTS, RULES, dashboard_queries

Series = dict[str, str]  # a value a minute, in promtool's notation: "1x30" is 1 for half an hour, "0+2x30" grows by 2


def buckets(name: str, per_minute: dict[str, int]) -> Series:
    """per_minute: new observations up to each bound."""
    labels = "namespace='a',prompt_bucket='all',concurrency_bucket='1',class='all'"
    return {f"tandem_{name}_bucket{{{labels},le='{le}'}}": f"0+{count}x60" for le, count in per_minute.items()}


def workers(pool: str, state: str, count: int = 1) -> Series:
    return {f"tandem_workers{{namespace='a',pool='{pool}',state='{state}'}}": f"{count}x60"}


def counter(name: str, labels: str, values: str) -> Series:
    return {f"tandem_{name}{{namespace='a',{labels}}}": values}


def memory(kv_free: int, slots_free: int, queued: int) -> Series:
    """Of 100 blocks and 100 slots."""
    series = counter("requests_under_way", "phase='queued'", f"{queued}x60")
    for name, free in (("kv_blocks", kv_free), ("state_slots", slots_free)):
        series |= counter(name, "pool='decode',state='free'", f"{free}x60")
        series |= counter(name, "pool='decode',state='used'", f"{100 - free}x60")
    return series


SLOW = {"0.1": 0, "0.5": 60, "1.0": 60, "+Inf": 60}
QUICK = {"0.1": 60, "0.5": 60, "1.0": 60, "+Inf": 60}
IDLE = {"0.1": 0, "0.5": 0, "1.0": 0, "+Inf": 0}
ANSWERED = counter("requests_total", "outcome='length'", "0+100x60")

FIRES: dict[str, list[Series]] = {
    "TandemPrefillPoolEmpty": [workers("decode", "ready"), workers("prefill", "draining"), workers("prefill", "ready", 0)],
    "TandemDecodePoolEmpty": [workers("prefill", "ready"), workers("decode", "lost")],
    "TandemRequestsFail": [
        counter("requests_total", "outcome='failed'", "0x10 1+1x50"),
        counter("requests_total", "outcome='unavailable'", "0+1x60"),
    ],
    "TandemOverloaded": [ANSWERED | counter("requests_total", "outcome='overloaded'", "0+2x60")],
    "TandemPrefillShort": [
        counter("queue_tokens", "pool='prefill'", "10000x60") | counter("prefill_tokens_total", "class='batch'", "0+600x60")
    ],
    "TandemDecodeMemoryShort": [memory(4, 60, 1), memory(60, 4, 1), memory(0, 0, 9)],
    "TandemDecodeStepSlow": [buckets("decode_step_seconds", SLOW)],
    "TandemHandoffExposed": [buckets("handoff_exposed_seconds", {"0.1": 0, "0.5": 0, "1.0": 60, "+Inf": 60})],
    "TandemHandoffsRefused": [counter("handoffs_refused_total", "field='nonce'", "0x20 1x40")],
    "TandemAttemptsFail": [counter("attempts_failed_total", "kind='WorkerLost'", "0+1x60")],
    "TandemWorkersLost": [workers("decode", "lost")],
    "TandemLeasesQuarantined": [counter("leases", "state='quarantined'", "2x60")],
    "TandemPoolMismatch": [counter("pool_mismatches_total", "pool='decode'", "0x20 1x40")],
    "TandemRoutersGone": [{"up": "1x60"}],
}
SILENT: dict[str, list[Series]] = {
    "TandemPrefillPoolEmpty": [workers("prefill", "ready"), workers("prefill", "ready") | workers("prefill", "lost")],
    "TandemDecodePoolEmpty": [workers("decode", "ready", 3)],
    "TandemRequestsFail": [counter("requests_total", "outcome='failed'", "7x60"), ANSWERED],
    "TandemOverloaded": [
        ANSWERED | counter("requests_total", "outcome='overloaded'", "0x60"),
        counter("requests_total", "outcome='overloaded'", "5x60"),
    ],
    "TandemPrefillShort": [
        counter("queue_tokens", "pool='prefill'", "100x60") | counter("prefill_tokens_total", "class='batch'", "0+600x60"),
        counter("queue_tokens", "pool='prefill'", "0x60") | counter("prefill_tokens_total", "class='batch'", "600x60"),
    ],
    "TandemDecodeMemoryShort": [memory(4, 4, 0), memory(60, 60, 9), memory(100, 100, 0)],
    "TandemDecodeStepSlow": [buckets("decode_step_seconds", QUICK), buckets("decode_step_seconds", IDLE)],
    "TandemHandoffExposed": [buckets("handoff_exposed_seconds", QUICK), buckets("handoff_exposed_seconds", IDLE)],
    "TandemHandoffsRefused": [
        counter("handoffs_refused_total", "field='expires_at'", "0+1x60"),
        counter("handoffs_refused_total", "field='lease_id'", "0+1x60"),
        counter("handoffs_refused_total", "field='nonce'", "3x60"),
    ],
    "TandemAttemptsFail": [
        counter("attempts_failed_total", "kind='Leaving'", "0+9x60"),
        counter("attempts_failed_total", "kind='WorkerLost'", "0x30 1x30"),
    ],
    "TandemWorkersLost": [workers("decode", "ready")],
    "TandemLeasesQuarantined": [counter("leases", "state='quarantined'", "0x60"), counter("leases", "state='running'", "9x60")],
    "TandemPoolMismatch": [counter("pool_mismatches_total", "pool='decode'", "0x60")],
    "TandemRoutersGone": [counter("requests_under_way", "phase='queued'", "0x60")],
}
# Two routers say the same of two workers, which say it of themselves too; each of the three is scraped.
SEEN_BY_ALL = {
    f"tandem_{name}{{instance='{instance}',job='{job}',pool='decode',state='{state}'}}": f"{value}x60"
    for name in ("kv_blocks", "state_slots")
    for instance, job, used, total in (("r1", "x", 3, 10), ("r2", "x", 3, 10), ("w1", "y", 1, 5), ("w2", "y", 2, 5))
    for state, value in (("used", used), ("free", total - used))
}


def check(folder: Path, tests: list[dict[str, Any]]) -> None:
    (folder / "alerts.yml").write_text(yaml.safe_dump(RULES))
    (folder / "tests.yml").write_text(yaml.safe_dump({"rule_files": ["alerts.yml"], "tests": tests}))
    command = [binary("promtool"), "test", "rules", "tests.yml"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def case(series: Series, query: str, minute: int, value: float | None) -> dict[str, Any]:
    """A query and its one value at that minute; None: it has none."""
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": query,
                "eval_time": f"{minute}m",
                "exp_samples": [] if value is None else [{"labels": "{}", "value": value}],
            }
        ],
    }


def test_every_alert_is_tried_both_ways() -> None:
    assert set(FIRES) == set(SILENT) == set(ALERTS)


def firing(alert: str) -> str:
    """How many of the namespaces and kinds that the alert tells apart it fires for. It must not be the sum of two pools."""
    return f"count(ALERTS{{alertname='{alert}',alertstate='firing'}})"


def test_alerts_fire_when_they_should_and_not_when_they_should_not(tmp_path: Path) -> None:
    minute = {"TandemHandoffsRefused": 25, "TandemPoolMismatch": 25}
    tests = [case(series, firing(name), minute.get(name, 45), 1) for name, found in FIRES.items() for series in found]
    tests += [case(series, firing(name), 45, None) for name, found in SILENT.items() for series in found]
    check(tmp_path, tests)


def test_promtool_does_find_an_alert_that_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="FAILED"):
        check(tmp_path, [case(workers("decode", "ready"), firing("TandemDecodePoolEmpty"), 45, 1)])


def test_what_routers_and_workers_both_say_is_counted_once(tmp_path: Path) -> None:
    queries = dashboard_queries("5m")
    tests = [
        case(SEEN_BY_ALL, queries["decode: Memory in use: KV blocks"], 5, 0.3),
        case(SEEN_BY_ALL, queries["decode: Memory in use: state slots"], 5, 0.3),
    ]
    check(tmp_path, tests)


@pytest.mark.parametrize("name", [name for name, query in dashboard_queries("5m").items() if "histogram_quantile" in query])
def test_no_quantile_is_nan_when_nothing_happens(name: str) -> None:
    """That the comparison takes NaN out is shown on a real cluster; here, that none lacks it."""
    assert dashboard_queries("5m")[name].endswith(" >= 0")
