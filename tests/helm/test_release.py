"""The chart's whole life with the real Helm, against a server that answers as Kubernetes does."""

import http.client
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import helm_python
import pytest

from tests.helm.charts import CHART, SECRET, case_values, merge
from tests.helm.fake_api import Store, api_server

NAMESPACE = "serving"
DEPLOYMENTS = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments"


class Cluster:
    def __init__(self, helm: helm_python.Config, url: str, store: Store) -> None:
        self.helm, self.url, self.store = helm, url, store

    def owned(self) -> dict[str, dict[str, Any]]:
        """What the release has put into its namespace, by path."""
        return {path: thing for path, thing in self.store.objects.items() if f"/namespaces/{NAMESPACE}/" in path}

    def written(self) -> set[str]:
        """Paths touched since the last look."""
        paths = {path for _, path in self.store.journal}
        self.store.journal.clear()
        return paths

    def replicas(self, role: str) -> int:
        return int(self.store.objects[f"{DEPLOYMENTS}/rel-tandem-{role}"]["spec"]["replicas"])


@pytest.fixture(name="cluster")
def _cluster() -> Iterator[Cluster]:
    with api_server() as (url, store):
        kubeconfig = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "fake", "cluster": {"server": url}}],
            "users": [{"name": "fake", "user": {}}],
            "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "fake", "namespace": NAMESPACE}}],
            "current-context": "fake",
        }
        with helm_python.Config(
            kubeconfig_content=json.dumps(kubeconfig),
            namespace=NAMESPACE,
            storage_driver="memory",
            qps=1000.0,
            burst_limit=1000,
        ) as helm:
            yield Cluster(helm, url, store)


def test_install_upgrade_rollback_test_and_uninstall(cluster: Cluster) -> None:
    cluster.helm.install(CHART, "rel", SECRET, wait="watcher", timeout=20)
    installed = {path: thing["spec"] for path, thing in cluster.owned().items() if "spec" in thing}
    assert {f"{DEPLOYMENTS}/rel-tandem-{role}" for role in ("prefill", "decode", "router")} <= installed.keys()

    cluster.helm.upgrade(CHART, "rel", merge(SECRET, {"decode": {"replicas": 3}}), wait="watcher", timeout=20)
    assert (cluster.replicas("prefill"), cluster.replicas("decode")) == (1, 3)

    cluster.helm.rollback("rel", version=1, wait="watcher", timeout=20)
    assert {path: thing["spec"] for path, thing in cluster.owned().items() if "spec" in thing} == installed
    assert [entry["revision"] for entry in cluster.helm.history("rel")] == [1, 2, 3]

    cluster.written()
    cluster.helm.test("rel", timeout=20)
    assert f"/api/v1/namespaces/{NAMESPACE}/pods/rel-tandem-generate" in cluster.written()

    cluster.helm.uninstall("rel", timeout=20)
    assert cluster.owned() == {}


def test_an_upgrade_of_one_pool_changes_that_pool_alone(cluster: Cluster) -> None:
    cluster.helm.install(CHART, "rel", SECRET)
    before = {path: (thing.get("spec"), thing.get("data")) for path, thing in cluster.owned().items()}
    cluster.helm.upgrade(CHART, "rel", merge(SECRET, {"decode": {"replicas": 2, "shmSize": "1Gi"}}))
    after = {path: (thing.get("spec"), thing.get("data")) for path, thing in cluster.owned().items()}
    assert [path for path in before if before[path] != after[path]] == [f"{DEPLOYMENTS}/rel-tandem-decode"]
    assert before.keys() == after.keys()


def test_kubectl_scale_touches_one_pool_only(cluster: Cluster) -> None:
    """Its request is a merge patch of the scale subresource."""
    cluster.helm.install(CHART, "rel", SECRET)
    cluster.written()
    connection = http.client.HTTPConnection(urlsplit(cluster.url).netloc)
    patch = json.dumps({"spec": {"replicas": 4}})
    connection.request(
        "PATCH", f"{DEPLOYMENTS}/rel-tandem-decode/scale", patch, {"Content-Type": "application/merge-patch+json"}
    )
    answer = connection.getresponse()
    assert (answer.status, json.loads(answer.read())["spec"]) == (http.client.OK, {"replicas": 4})
    connection.close()
    assert cluster.written() == {f"{DEPLOYMENTS}/rel-tandem-decode"}
    assert (cluster.replicas("prefill"), cluster.replicas("decode")) == (1, 4)


def test_monitors_and_rules_are_made_where_their_api_exists(cluster: Cluster) -> None:
    cluster.helm.install(CHART, "rel", case_values("monitoring"))
    owned = cluster.owned()
    monitor = owned[f"/apis/monitoring.coreos.com/v1/namespaces/{NAMESPACE}/podmonitors/rel-tandem"]
    rule = owned[f"/apis/monitoring.coreos.com/v1/namespaces/{NAMESPACE}/prometheusrules/rel-tandem"]
    assert monitor["metadata"]["labels"]["release"] == rule["metadata"]["labels"]["release"] == "prometheus"
    router = owned[f"{DEPLOYMENTS}/rel-tandem-router"]["spec"]["template"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= router["metadata"]["labels"].items()
    ports = {port["name"] for port in router["spec"]["containers"][0]["ports"]}
    assert {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]} <= ports
    alerts = [rule["annotations"]["runbook_url"] for group in rule["spec"]["groups"] for rule in group["rules"]]
    assert alerts
    assert all(url.startswith("https://") and url.endswith(".md") for url in alerts)


def test_one_monitor_finds_routers_and_where_asked_for_workers_at_ports_that_they_have(cluster: Cluster) -> None:
    monitor_path = f"/apis/monitoring.coreos.com/v1/namespaces/{NAMESPACE}/podmonitors/rel-tandem"
    for case, components in (("monitoring", {"router"}), ("observed", {"router", "prefill", "decode"})):
        cluster.helm.install(CHART, "rel", case_values(case))
        owned = cluster.owned()
        spec = owned[monitor_path]["spec"]
        (expression,) = spec["selector"]["matchExpressions"]
        assert set(expression["values"]) == components
        scraped = {endpoint["port"] for endpoint in spec["podMetricsEndpoints"]}
        for component in components:
            template = owned[f"{DEPLOYMENTS}/rel-tandem-{component}"]["spec"]["template"]
            assert spec["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
            assert template["metadata"]["labels"][expression["key"]] == component
            ports = {port["name"]: port["containerPort"] for port in template["spec"]["containers"][0]["ports"]}
            assert len(scraped & ports.keys()) == 1
            settings = json.loads(owned[f"/api/v1/namespaces/{NAMESPACE}/configmaps/rel-tandem"]["data"]["cluster.json"])
            assert component == "router" or ports["metrics"] == settings["worker"]["metrics_port"]
        cluster.helm.uninstall("rel", timeout=20)


def test_a_chart_that_is_refused_leaves_nothing_behind(cluster: Cluster) -> None:
    with pytest.raises(helm_python.HelmError, match=r"cluster\.existingSecret must name a Secret"):
        cluster.helm.install(CHART, "rel", {})
    assert cluster.owned() == {}
