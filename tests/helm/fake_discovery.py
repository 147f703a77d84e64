"""What the fake API server says of itself: versions, groups, resources, and as much of OpenAPI as clients look for."""

from __future__ import annotations

from typing import Any

Object = dict[str, Any]

# group/version: kind → plural. All are in namespaces but Namespace.
RESOURCES = {
    "v1": {
        "Pod": "pods",
        "Service": "services",
        "ConfigMap": "configmaps",
        "Secret": "secrets",
        "ServiceAccount": "serviceaccounts",
        "Namespace": "namespaces",
        "Event": "events",
    },
    "apps/v1": {"Deployment": "deployments", "StatefulSet": "statefulsets", "ReplicaSet": "replicasets"},
    "policy/v1": {"PodDisruptionBudget": "poddisruptionbudgets"},
    "autoscaling/v2": {"HorizontalPodAutoscaler": "horizontalpodautoscalers"},
    "autoscaling/v1": {},
    "networking.k8s.io/v1": {"NetworkPolicy": "networkpolicies"},
    "monitoring.coreos.com/v1": {"PodMonitor": "podmonitors", "PrometheusRule": "prometheusrules"},
}
VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]


def discovery(path: str) -> Object | None:
    if path == "/version":
        return {"major": "1", "minor": "34", "gitVersion": "v1.34.0"}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}
    if path == "/apis":
        groups = []
        for name in RESOURCES:
            if "/" in name:
                group, version = name.split("/")
                entry = {"groupVersion": name, "version": version}
                groups.append({"name": group, "versions": [entry], "preferredVersion": entry})
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    if path == "/openapi/v3":
        return {"paths": {_root(name).strip("/"): {"serverRelativeURL": f"/openapi/v3{_root(name)}"} for name in RESOURCES}}
    if path.startswith("/openapi/v3/"):
        return _openapi(path.removeprefix("/openapi/v3"))
    for name, kinds in RESOURCES.items():
        if path == _root(name):
            return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": name, "resources": _resources(name, kinds)}
    return None


def _resources(name: str, kinds: dict[str, str]) -> list[Object]:
    resources: list[Object] = []
    for kind, plural in kinds.items():
        resources.append(
            {"name": plural, "singularName": kind.lower(), "namespaced": kind != "Namespace", "kind": kind, "verbs": VERBS}
        )
        if name == "apps/v1":
            scale = {"group": "autoscaling", "version": "v1", "kind": "Scale", "verbs": ["get", "patch", "update"]}
            resources.append({"name": f"{plural}/scale", "singularName": "", "namespaced": True, **scale})
    return resources


def _openapi(root: str) -> Object:
    """Only what clients look for: that a patch knows fieldValidation, by kind."""
    name = root.removeprefix("/apis/").removeprefix("/api/")
    group, _, version = name.rpartition("/")
    paths = {}
    for kind, plural in RESOURCES[name].items():
        marks = {"x-kubernetes-group-version-kind": {"group": group, "version": version, "kind": kind}}
        parameters = [{"name": key, "in": "query", "schema": {"type": "string"}} for key in ("fieldValidation", "dryRun")]
        patch = {**marks, "x-kubernetes-action": "patch", "parameters": parameters, "responses": {}}
        paths[f"{root}/namespaces/{{namespace}}/{plural}/{{name}}"] = {"patch": patch}
    return {
        "openapi": "3.0.0",
        "info": {"title": "Kubernetes", "version": "v1.34.0"},
        "paths": paths,
        "components": {"schemas": {}},
    }


def _root(name: str) -> str:
    return f"/apis/{name}" if "/" in name else f"/api/{name}"


def collection(path: str) -> tuple[str, str]:
    """Group/version and kind of the objects in a collection. Raises StopIteration: there is no such."""
    plural = path.rpartition("/")[2]
    return next(
        (name, kind)
        for name, kinds in RESOURCES.items()
        for kind, its in kinds.items()
        if its == plural and path.startswith(f"{_root(name)}/")
    )


def is_collection(path: str) -> bool:
    return any(
        path.startswith(f"{_root(name)}/") and path.rpartition("/")[2] in kinds.values() for name, kinds in RESOURCES.items()
    )
