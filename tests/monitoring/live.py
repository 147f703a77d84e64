"""What a running Prometheus says of a cluster that it scrapes, by every query of the dashboards and the alerts."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import yaml

from tests.monitoring.prometheus import Prometheus
from tests.monitoring.queries import ALERTS, dashboard_queries, measured_part

__all__ = [
    "EMPTY_WHEN_HEALTHY",
    "RATE_INTERVAL_S",
    "alerts_that_fire",
    "nans",
    "scaling_queries",
    "scrape_configuration",
    "unanswered",
]

RATE_INTERVAL_S = 8
DOCS = Path(__file__).resolve().parent.parent.parent / "docs"
METRICS, KUBERNETES = DOCS / "metrics.md", DOCS / "kubernetes.md"

# Nothing is the answer of a cluster that is well.
EMPTY_WHEN_HEALTHY = {
    "TandemPrefillPoolEmpty": "asks for the absence of ready workers",
    "TandemDecodePoolEmpty": "asks for the absence of ready workers",
    "TandemRoutersGone": "asks for the absence of routers",
}


def scrape_configuration(router: str) -> dict[str, Any]:
    """The one that docs/metrics.md gives, for the router at host:port, and quicker."""
    (text,) = re.findall(r"^```yaml\n(.*?)^```", METRICS.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    config: dict[str, Any] = yaml.safe_load(text.replace("ROUTER:8000", router))
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    for job in config["scrape_configs"]:
        for discovery in job["http_sd_configs"]:
            assert router in discovery["url"]
            discovery["refresh_interval"] = "1s"
    return config


def scaling_queries() -> dict[str, str]:
    """Those that docs/kubernetes.md gives for HPA and KEDA, by pool."""
    rows = re.findall(r"^\| (prefill|decode) \| [^|`]* \| `(sum[^`]*)`", KUBERNETES.read_text(encoding="utf-8"), re.MULTILINE)
    assert [pool for pool, _ in rows] == ["prefill", "decode"]
    return {f"scaling: {pool}": query.replace("[2m]", f"[{RATE_INTERVAL_S}s]") for pool, query in rows}


def _queries() -> dict[str, str]:
    """Of alerts, what they compare with their thresholds."""
    compared = {name: measured_part(expression) for name, expression in ALERTS.items() if name not in EMPTY_WHEN_HEALTHY}
    return dashboard_queries(f"{RATE_INTERVAL_S}s") | compared | scaling_queries()


def unanswered(prometheus: Prometheus) -> dict[str, str]:
    """Queries that give nothing and should, or something and should not, or no number."""
    wrong = {}
    for name, query in _queries().items():
        found = prometheus.query(query)
        if bool(found) == (name in EMPTY_WHEN_HEALTHY) or not all(math.isfinite(sample.value) for sample in found):
            wrong[name] = f"{query}: {[sample.value for sample in found]}"
    return wrong


def alerts_that_fire(prometheus: Prometheus) -> dict[str, str]:
    return {name: expression for name, expression in ALERTS.items() if prometheus.query(expression)}


def nans(prometheus: Prometheus) -> dict[str, str]:
    """Queries of dashboards, alerts and scalers that give what is no number."""
    queries = dashboard_queries(f"{RATE_INTERVAL_S}s") | ALERTS | scaling_queries()
    return {
        name: query
        for name, query in queries.items()
        if not all(math.isfinite(sample.value) for sample in prometheus.query(query))
    }
