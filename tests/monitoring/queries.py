"""Every query that a dashboard or an alert makes, as a name and PromQL that can be evaluated."""

from __future__ import annotations

from typing import Any

import promql_parser
import yaml

from tests.helm.charts import CHART
from tools.dashboards import DASHBOARDS

__all__ = ["ALERTS", "RULES", "dashboard_queries", "measured_part"]

RULES: dict[str, Any] = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text(encoding="utf-8"))
ALERTS: dict[str, str] = {rule["alert"]: rule["expr"] for group in RULES["groups"] for rule in group["rules"]}


def dashboard_queries(rate_interval: str) -> dict[str, str]:
    """By "dashboard: panel: legend"; Grafana's variables are filled in."""
    return {
        f"{dashboard.name}: {panel.title}: {legend}": query.replace("$__rate_interval", rate_interval).replace(
            "$namespace", ".*"
        )
        for dashboard in DASHBOARDS
        for panel in dashboard.panels
        for legend, query in panel.queries
    }


def measured_part(alert: str) -> str:
    """Of an alert, what is compared with its threshold: the side that is no number of the outermost comparison."""
    node: Any = promql_parser.parse(alert)
    while isinstance(node, promql_parser.BinaryExpr) and not isinstance(node.rhs, promql_parser.NumberLiteral):
        node = _inside(node.lhs)
    assert isinstance(node, promql_parser.BinaryExpr), alert
    return str(_inside(node.lhs).prettify())


def _inside(node: Any) -> Any:
    while isinstance(node, promql_parser.ParenExpr):
        node = node.expr
    return node
