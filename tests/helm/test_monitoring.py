"""Dashboards and alerts ask for metrics that exist, with labels that they have; every alert has its page."""

import json
import re
from collections.abc import Iterator

import promql_parser
import pytest
import yaml

from tandem.metrics import REGISTRY
from tests.helm.charts import CHART, ROOT
from tools.dashboards import DASHBOARDS, FOLDER, render

RULES = [rule for group in yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())["groups"] for rule in group["rules"]]
RUNBOOKS = ROOT / "docs" / "runbooks"
FROM_THE_SCRAPE = {"namespace", "pod", "container", "endpoint", "instance", "job", "le"}


def known() -> dict[str, set[str]]:
    """Labels of every series' name that `/metrics` can show."""
    names: dict[str, set[str]] = {}
    for family in REGISTRY.collect():
        labels = set(getattr(family, "_labelnames", ()))
        suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}.get(family.type, [""])
        names.update({family.name + suffix: labels for suffix in suffixes})
    return names


def queries() -> Iterator[tuple[str, str]]:
    for file in sorted(FOLDER.glob("*.json")):
        for panel in json.loads(file.read_text(encoding="utf-8"))["panels"]:
            for target in panel["targets"]:
                yield f"{file.stem}: {panel['title']}", target["expr"]
    for rule in RULES:
        yield rule["alert"], rule["expr"]


QUERIES = list(queries())


def selectors(query: str) -> list[tuple[str, set[str]]]:
    """Metric and labels of each series that a query asks for."""
    found: list[tuple[str, set[str]]] = []

    def walk(node: object) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found.append((node.name, {matcher.name for matcher in node.matchers.matchers}))
        for part in ("expr", "vector_selector", "lhs", "rhs", "param"):
            if (below := getattr(node, part, None)) is not None:
                walk(below)
        for argument in getattr(node, "args", None) or ():
            walk(argument)

    walk(promql_parser.parse(query.replace("$__rate_interval", "5m").replace("$namespace", ".*")))
    return found


@pytest.mark.parametrize("query", [query for _, query in QUERIES], ids=[name for name, _ in QUERIES])
def test_queries_ask_for_series_and_labels_that_exist(query: str) -> None:
    names = known()
    asked = selectors(query)
    assert asked
    for metric, labels in asked:
        assert metric in names
        assert labels <= names[metric] | FROM_THE_SCRAPE


@pytest.mark.parametrize("query", [query for _, query in QUERIES], ids=[name for name, _ in QUERIES])
def test_queries_group_by_labels_that_exist(query: str) -> None:
    names = known()
    labels = set().union(*(names[metric] for metric, _ in selectors(query)))
    for group in re.findall(r"\b(?:by|on) \(([^)]*)\)", query):
        assert {label.strip() for label in group.split(",")} <= labels | FROM_THE_SCRAPE


def test_no_query_divides_by_what_may_be_zero() -> None:
    """0 / 0 is NaN, which blocks scalers and hides panels: every divisor is filtered."""
    for name, query in QUERIES:
        for divisor in re.findall(r" / (.*)", query):
            assert "> 0)" in divisor, name


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.name)
def test_the_json_is_what_the_panels_say(dashboard: object) -> None:
    assert (FOLDER / f"{dashboard.name}.json").read_text(encoding="utf-8") == render(dashboard)  # type: ignore[attr-defined, arg-type]


def test_the_five_dashboards_are_there() -> None:
    assert {file.stem for file in FOLDER.glob("*.json")} == {"requests", "prefill", "decode", "handoff", "failures"}


def test_every_metric_of_ours_is_on_a_dashboard() -> None:
    shown = {metric for _, query in QUERIES for metric, _ in selectors(query)}
    left_out = {"tandem_prompt_tokens_total"}  # the prefill dashboard shows what was computed and found instead
    families = {re.sub("_(total|bucket|sum|count)$", "", name) for name in known() if name not in left_out}
    assert families <= {re.sub("_(total|bucket|sum|count)$", "", name) for name in shown}


def test_every_alert_has_its_page_and_every_page_its_alert() -> None:
    alerts = [rule["alert"] for rule in RULES]
    assert len(alerts) == len(set(alerts))
    assert {file.stem for file in RUNBOOKS.glob("*.md")} == set(alerts)
    for rule in RULES:
        assert rule["annotations"]["runbook_url"] == f"RUNBOOKS/{rule['alert']}.md"
        assert rule["annotations"]["summary"].endswith(".")
        assert rule["labels"]["severity"] in ("critical", "warning")


@pytest.mark.parametrize("page", sorted(RUNBOOKS.glob("*.md")), ids=lambda page: page.stem)
def test_runbooks_say_what_it_means_where_to_look_and_what_to_do(page: object) -> None:
    text = page.read_text(encoding="utf-8")  # type: ignore[attr-defined]
    for part in ("**Means.**", "**Clients.**", "**Look.**", "**Do.**"):
        assert part in text
    for link in re.findall(r"\]\((\w+\.md)\)", text):
        assert (RUNBOOKS / link).is_file()
    names = known()
    for metric in re.findall(r"`(tandem_\w+)`", text):
        assert metric in names or f"{metric}_bucket" in names, metric
