"""Every set of values renders to objects that Kubernetes would take and that fit each other."""

import copy
import functools
import json
import re
from typing import Any

import helm_python
import kubernetes_validate
import pytest

from tests.helm.charts import (
    CASES,
    CHART,
    PRESETS,
    SECRET,
    Object,
    case_values,
    merge,
    objects,
    pods,
    preset_values,
    texts,
)

MATRIX: dict[str, dict[str, Any]] = {
    **{f"ci {name}": case_values(name) for name in CASES},
    "preset cpu": preset_values("cpu"),
    "preset gpu": preset_values("gpu"),
    "preset gpu+rdma": preset_values("gpu", "rdma"),
    "presets and features": merge(preset_values("gpu", "rdma"), case_values("tls"), case_values("scaling"), case_values("hub")),
    "no extras": merge(SECRET, {role: {"pdb": {"enabled": False}} for role in ("prefill", "decode", "router")}),
}
QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?")
NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
KUBERNETES = "1.30"


@pytest.fixture(params=MATRIX, name="found")
def _found(request: pytest.FixtureRequest) -> list[Object]:
    return objects(MATRIX[request.param])


@pytest.mark.parametrize("name", [*CASES, *PRESETS])
def test_strict_lint_has_nothing_to_say(name: str) -> None:
    values = case_values(name) if name in CASES else preset_values(*({"rdma": ["gpu", "rdma"]}.get(name, [name])))
    report = helm_python.lint(CHART, values, strict=True)
    told = [message for message in report["messages"] if message["severity"] > 1]
    assert (report["errors"], told) == ([], [])


def test_objects_fit_the_schemas_of_kubernetes(found: list[Object]) -> None:
    for thing in found:
        _validate(json.dumps(thing))


@functools.cache
def _validate(thing_json: str) -> None:
    """Many are the same whatever the values. An unknown kind raises too."""
    kubernetes_validate.validate(json.loads(thing_json), KUBERNETES, strict=True)


def test_the_schemas_refuse_what_they_do_not_know() -> None:
    thing = copy.deepcopy(objects(SECRET)[0])
    thing["specs"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="specs"):
        _validate(json.dumps(thing))
    thing["kind"] = "Nothing"
    with pytest.raises(kubernetes_validate.SchemaNotFoundError):
        _validate(json.dumps(thing))


def test_one_object_a_file_and_no_name_twice(found: list[Object]) -> None:
    names = [(thing["kind"], thing["metadata"]["name"]) for thing in found]
    assert len(names) == len(set(names))


def test_every_file_holds_one_object() -> None:
    for values in MATRIX.values():
        for path, text in texts(values).items():
            assert len(re.findall(r"^kind:", text, re.MULTILINE)) == 1, path


def test_names_are_short_enough_for_the_longest_release() -> None:
    for thing in objects(SECRET, name="r" * 53):
        name = thing["metadata"]["name"]
        assert len(name) <= 53, name
        assert NAME.fullmatch(name)
        for value in thing["metadata"].get("labels", {}).values():
            assert len(value) <= 63


def test_selectors_match_the_pods_they_mean_and_no_others(found: list[Object]) -> None:
    labels = {name: pod["metadata"]["labels"] for name, pod in pods(found)}
    for thing in found:
        selector = _selector(thing)
        if selector is None:
            continue
        chosen = {name for name, of in labels.items() if selector.items() <= of.items()}
        component = selector["app.kubernetes.io/component"]
        assert chosen, thing["metadata"]["name"]
        assert all(labels[name]["app.kubernetes.io/component"] == component for name in chosen)


def _selector(thing: Object) -> dict[str, str] | None:
    if thing["kind"] in ("Deployment", "StatefulSet", "PodDisruptionBudget"):
        return dict(thing["spec"]["selector"]["matchLabels"])
    return dict(thing["spec"]["selector"]) if thing["kind"] == "Service" else None


def test_selectors_hold_nothing_that_a_new_version_of_the_chart_changes(found: list[Object]) -> None:
    for thing in found:
        if selector := _selector(thing):
            assert set(selector) <= {f"app.kubernetes.io/{key}" for key in ("name", "instance", "component")}
    for _, pod in pods(found):
        assert "helm.sh/chart" not in pod["metadata"]["labels"]


def test_services_point_to_ports_that_their_pods_have(found: list[Object]) -> None:
    for service in (thing for thing in found if thing["kind"] == "Service"):
        for _, pod in pods(found):
            if service["spec"]["selector"].items() <= pod["metadata"]["labels"].items():
                ports = {port["name"] for port in _ports(pod)}
                assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports


def _ports(pod: Object) -> list[Object]:
    return [port for container in pod["spec"]["containers"] for port in container.get("ports", [])]


def test_probes_use_ports_of_their_container_and_port_numbers_are_valid(found: list[Object]) -> None:
    for name, pod in pods(found):
        numbers = [port["containerPort"] for port in _ports(pod)]
        assert all(0 < number < 65536 for number in numbers)
        assert len(numbers) == len(set(numbers)), name
        for container in pod["spec"]["containers"]:
            own = {port["name"] for port in container.get("ports", [])}
            for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
                probe = container.get(kind, {})
                for action in ("httpGet", "tcpSocket"):
                    assert action not in probe or probe[action]["port"] in own, f"{name} {kind}"


def test_every_mount_has_its_volume_and_every_volume_is_mounted(found: list[Object]) -> None:
    for name, pod in pods(found):
        volumes = [volume["name"] for volume in pod["spec"]["volumes"]]
        mounts = [mount for container in pod["spec"]["containers"] for mount in container["volumeMounts"]]
        assert {mount["name"] for mount in mounts} == set(volumes), name
        assert len(volumes) == len(set(volumes)), name
        paths = [mount["mountPath"] for mount in mounts]
        assert len(paths) == len(set(paths)), name


def test_files_on_command_lines_lie_in_mounted_folders(found: list[Object]) -> None:
    for name, pod in pods(found):
        for container in pod["spec"]["containers"]:
            folders = [mount["mountPath"] for mount in container["volumeMounts"]]
            for path in re.findall(r"/etc/tandem/[-\w./]+", " ".join(container["args"])):
                assert any(path.startswith(f"{folder}/") for folder in folders), f"{name}: {path}"


def test_quantities_are_valid_and_requests_stay_below_limits(found: list[Object]) -> None:
    for name, pod in pods(found):
        for container in pod["spec"]["containers"]:
            resources = container["resources"]
            for amounts in resources.values():
                for amount in amounts.values():
                    assert QUANTITY.fullmatch(str(amount)), f"{name}: {amount}"
            for resource, limit in resources["limits"].items():
                assert _number(resources["requests"].get(resource, "0")) <= _number(limit), f"{name}: {resource}"


def _number(quantity: str) -> float:
    number, unit = re.fullmatch(r"([0-9.]+)([a-zA-Z]*)", str(quantity)).groups()  # type: ignore[union-attr]
    return float(number) * {"": 1, "m": 1e-3, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}[unit]


def test_environment_names_and_container_names_are_not_given_twice(found: list[Object]) -> None:
    for name, pod in pods(found):
        containers = [container["name"] for container in pod["spec"]["containers"]]
        assert len(containers) == len(set(containers))
        for container in pod["spec"]["containers"]:
            variables = [variable["name"] for variable in container.get("env", [])]
            assert len(variables) == len(set(variables)), name


def test_no_pod_runs_as_root_or_writes_to_its_root(found: list[Object]) -> None:
    for _, pod in pods(found):
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["automountServiceAccountToken"] is False
        for container in spec["containers"]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] is True
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"]["drop"] == ["ALL"]
            assert set(context["capabilities"].get("add", [])) <= {"IPC_LOCK"}


def test_no_image_is_the_latest(found: list[Object]) -> None:
    for _, pod in pods(found):
        for container in pod["spec"]["containers"]:
            assert re.fullmatch(r"[\w./-]+(:(?!latest$)[\w.-]+|@sha256:[0-9a-f]{64})", container["image"])


def test_no_secret_is_made_from_values(found: list[Object]) -> None:
    assert "Secret" not in {thing["kind"] for thing in found}


def test_the_grace_period_outlives_the_drain(found: list[Object]) -> None:
    for _, pod in pods(found):
        for container in pod["spec"]["containers"]:
            if container["name"] != "worker":
                continue
            options = dict(argument.lstrip("-").split("=", 1) for argument in container["args"][1:])
            leave = container["lifecycle"]["preStop"]["exec"]["command"]
            wait_s = float(next(part for part in leave if part.startswith("--timeout-s=")).partition("=")[2])
            assert float(options["leave-s"]) < wait_s < pod["spec"]["terminationGracePeriodSeconds"]


def test_a_routers_grace_period_outlives_its_streams(found: list[Object]) -> None:
    (pod,) = [pod for name, pod in pods(found) if name.endswith("-router")]
    (container,) = pod["spec"]["containers"]
    (settings,) = [json.loads(word.partition("=")[2]) for word in container["args"] if word.startswith("--settings=")]
    sleep_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert sleep_s + settings["grace_s"] < pod["spec"]["terminationGracePeriodSeconds"]


def test_scaled_pools_leave_their_size_to_the_scaler() -> None:
    found = {thing["metadata"]["name"]: thing for thing in objects(case_values("scaling")) if thing["kind"] == "Deployment"}
    assert all("replicas" not in found[f"rel-tandem-{role}"]["spec"] for role in ("prefill", "decode", "router"))


def test_rdma_asks_for_the_device_and_for_locked_memory() -> None:
    for name, pod in pods(objects(preset_values("gpu", "rdma"))):
        container = pod["spec"]["containers"][0]
        wants = "rdma/ib" in container["resources"]["limits"]
        assert wants == (container["name"] == "worker"), name
        assert wants == ("IPC_LOCK" in container["securityContext"]["capabilities"].get("add", []))
