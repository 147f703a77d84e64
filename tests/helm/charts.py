"""Rendering the chart, and reading what comes out strictly."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import helm_python
import yaml

ROOT = Path(__file__).resolve().parent.parent.parent
CHART = ROOT / "helm" / "tandem"
CASES = {file.name.removesuffix("-values.yaml"): file for file in sorted((CHART / "ci").glob("*-values.yaml"))}
PRESETS = {file.stem.removeprefix("values-"): file for file in sorted(CHART.glob("values-*.yaml"))}
SECRET = {"cluster": {"existingSecret": "tandem-cluster"}}

Object = dict[str, Any]


class _StrictLoader(yaml.SafeLoader):
    """YAML's own loader takes the last of two equal keys."""


def _mapping(loader: _StrictLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [loader.construct_object(key) for key, _ in node.value]
    twice = {key for key in keys if keys.count(key) > 1}
    if twice:
        raise yaml.YAMLError(f"line {node.start_mark.line + 1}: keys twice: {sorted(map(str, twice))}")
    loader.flatten_mapping(node)
    return {loader.construct_object(key, deep=True): loader.construct_object(value, deep=True) for key, value in node.value}


_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def parse(text: str) -> list[Object]:
    """Raises yaml.YAMLError: not YAML, or a key stands twice in one mapping."""
    return [document for document in yaml.load_all(text, _StrictLoader) if document]


def merge(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """As Helm merges values: mappings key by key, everything else whole."""
    result: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            old = result.get(key)
            result[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, Mapping) else value
    return result


def case_values(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load(CASES[name].read_text(encoding="utf-8")))


def preset_values(*names: str) -> dict[str, Any]:
    return merge(SECRET, *(yaml.safe_load(PRESETS[name].read_text(encoding="utf-8")) for name in names))


@functools.cache
def chart() -> helm_python.Chart:
    return helm_python.Chart.load(CHART)


def texts(values: Mapping[str, Any], name: str = "rel", **options: Any) -> dict[str, str]:
    """Manifest by template; those that came out empty are left out."""
    return _texts(json.dumps(values), name, **options)


@functools.cache
def _texts(values_json: str, name: str, **options: Any) -> dict[str, str]:
    rendered = chart().render(json.loads(values_json), name=name, namespace="serving", **options)
    return {path: text for path, text in rendered.items() if text.strip() and path.endswith(".yaml")}


def objects(values: Mapping[str, Any], name: str = "rel") -> list[Object]:
    """To be read only: whoever asks for the same gets the same."""
    return _objects(json.dumps(values), name)


@functools.cache
def _objects(values_json: str, name: str) -> list[Object]:
    return [document for text in _texts(values_json, name).values() for document in parse(text)]


def by_name(found: list[Object]) -> dict[tuple[str, str], Object]:
    return {(thing["kind"], thing["metadata"]["name"]): thing for thing in found}


def pod_of(thing: Object) -> Object | None:
    """The pod (template) of a workload, with metadata and spec."""
    if thing["kind"] == "Pod":
        return thing
    if thing["kind"] in ("Deployment", "StatefulSet"):
        template: Object = thing["spec"]["template"]
        return template
    return None


def pods(found: list[Object]) -> Iterator[tuple[str, Object]]:
    for thing in found:
        if (pod := pod_of(thing)) is not None:
            yield f"{thing['kind']}/{thing['metadata']['name']}", pod
