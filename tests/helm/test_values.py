"""Values that would not work are refused with a sentence; a pool's values are its own."""

from typing import Any

import helm_python
import pytest
import yaml

from tests.helm.charts import CHART, SECRET, chart, merge, texts

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no cluster secret": ({"cluster": {"existingSecret": ""}}, "cluster.existingSecret must name a Secret"),
    "latest image": ({"image": {"tag": "latest"}}, "image.tag must not be latest"),
    "folder without a volume": ({"model": {"source": "/models/x"}}, "model.volume.source names no volume"),
    "folder beside its volume": (
        {"model": {"source": "/data/x", "volume": {"source": {"hostPath": {"path": "/d"}}}}},
        "is not below model.volume.mountPath /models",
    ),
    "client certificates without TLS": ({"router": {"tls": {"clientCa": True}}}, "router.tls.existingSecret names no Secret"),
    "one port for two": ({"head": {"rayPort": 6380}}, "head.rayPort and head.membershipPort are both 6380"),
    "one port for both faces": ({"router": {"service": {"grpcPort": 8000}}}, "are both 8000"),
    "budget above the limit": ({"worker": {"cacheBudget": "6Gi"}}, "does not fit into prefill.resources.limits.memory 6Gi"),
    "cuda without a GPU": ({"worker": {"device": "cuda"}}, "prefill.resources.limits asks for no nvidia.com/gpu"),
    "scaling by nothing": ({"decode": {"autoscaling": {"enabled": True}}}, "decode.autoscaling.metrics is empty"),
    "scaling upside down": (
        {"router": {"autoscaling": {"enabled": True, "minReplicas": 5}}},
        "router.autoscaling.maxReplicas 4 is less than minReplicas 5",
    ),
    "probes that clash": (
        {"prefill": {"hostNetwork": True}, "decode": {"hostNetwork": True}},
        "prefill.probePort and decode.probePort must differ",
    ),
    "the chart's part of the worker": (
        {"worker": {"settings": {"host": "0.0.0.0"}}},
        "worker.settings.host is the chart's part",
    ),
    "traces of the chart's part": ({"worker": {"settings": {"tracing": {}}}}, "worker.settings.tracing is the chart's part"),
    "one port for probes and metrics": (
        {"monitoring": {"podMonitor": {"enabled": True, "workers": True, "workerPort": 8082}}},
        "prefill.probePort and monitoring.podMonitor.workerPort are both 8082",
    ),
    "metrics that clash": (
        {
            "monitoring": {"podMonitor": {"enabled": True, "workers": True}},
            "prefill": {"hostNetwork": True},
            "decode": {"hostNetwork": True, "probePort": 8083},
        },
        "two workers of a node would share monitoring.podMonitor.workerPort",
    ),
    "the chart's part of the router": ({"router": {"settings": {"tls": {}}}}, "router.settings.tls is the chart's part"),
}
NOT_IN_THE_SCHEMA: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": ({"decode": {"replica": 3}}, "replica"),
    "unknown top key": ({"routers": {}}, "routers"),
    "negative size": ({"decode": {"replicas": -1}}, "/decode/replicas"),
    "port out of range": ({"head": {"rayPort": 99999}}, "/head/rayPort"),
    "no quantity": ({"worker": {"cacheBudget": "lots"}}, "/worker/cacheBudget"),
    "no resource quantity": ({"prefill": {"resources": {"limits": {"memory": "6 GB"}}}}, "/prefill/resources/limits/memory"),
    "no service type": ({"router": {"service": {"type": "Ingress"}}}, "/router/service/type"),
    "no digest": ({"image": {"digest": "sha256:12"}}, "/image/digest"),
    "no device resource": ({"decode": {"rdma": {"resourceName": "ib"}}}, "/decode/rdma/resourceName"),
    "no URL": ({"tracing": {"otlpEndpoint": "collector:4317"}}, "/tracing/otlpEndpoint"),
    "no age": ({"router": {"connectionAgeSeconds": -1}}, "/router/connectionAgeSeconds"),
    "no drain": ({"worker": {"drainSeconds": 0}}, "/worker/drainSeconds"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_not_work_is_refused_with_a_sentence(name: str) -> None:
    values, sentence = REFUSED[name]
    with pytest.raises(helm_python.HelmRenderError) as refused:
        chart().render(merge(SECRET, values), name="rel")
    assert sentence in str(refused.value)


@pytest.mark.parametrize("name", NOT_IN_THE_SCHEMA)
def test_what_is_no_value_is_refused_by_name(name: str) -> None:
    values, path = NOT_IN_THE_SCHEMA[name]
    with pytest.raises(helm_python.HelmError) as refused:
        chart().render(merge(SECRET, values), name="rel")
    assert path in str(refused.value)


OF_ONE_POOL: list[dict[str, Any]] = [
    {"replicas": 7},
    {"resources": {"requests": {"cpu": "4"}}},
    {"shmSize": "1Gi", "startupSeconds": 60, "probePort": 9000, "hostNetwork": True},
    {"rdma": {"enabled": True}},
    {"nodeSelector": {"disk": "ssd"}, "tolerations": [{"operator": "Exists"}], "priorityClassName": "high"},
    {"affinity": {"nodeAffinity": {}}, "topologySpreadConstraints": [{"maxSkew": 1}], "runtimeClassName": "nvidia"},
    {"podAnnotations": {"a": "b"}, "podLabels": {"a": "b"}, "extraEnv": [{"name": "A", "value": "b"}]},
    {"pdb": {"maxUnavailable": 2}},
    {
        "autoscaling": {
            "enabled": True,
            "metrics": [{"type": "Resource", "resource": {"name": "cpu", "target": {"type": "Value"}}}],
        }
    },
]


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("values", OF_ONE_POOL, ids=lambda values: ",".join(values))
def test_a_pools_values_change_no_byte_of_any_other_object(role: str, values: dict[str, Any]) -> None:
    before, after = texts(SECRET), texts(merge(SECRET, {role: values}))
    changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    assert changed
    assert all(path.rpartition("/")[2].startswith(f"{role}-") for path in changed), changed


def test_every_value_of_a_pool_is_among_those_tried() -> None:
    pool = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))["decode"]
    assert set(pool) == {key for values in OF_ONE_POOL for key in values}


def test_the_secret_names_reach_every_pod_that_needs_them() -> None:
    rendered = texts(merge(SECRET, {"cluster": {"existingSecret": "other", "secretKey": "a"}}))
    for path in ("head-statefulset", "prefill-deployment", "decode-deployment", "router-deployment"):
        text = rendered[f"tandem/templates/{path}.yaml"]
        assert "secretName: other" in text
        assert "{key: a, path: cluster-secret}" in text
