"""Every command line and every configuration in the chart is one that tandem takes."""

import argparse
import importlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from controller.node.ray_process import head_command, node_command
from tandem.cli.head import head_config
from tandem.cli.main import COMMANDS, build_parser
from tandem.cli.router import router_config
from tandem.config import ClusterConfig, TlsConfig
from tandem.config_json import load
from tests.helm.charts import CASES, Object, case_values, objects, pods, preset_values

VALUES: dict[str, dict[str, Any]] = {**{name: case_values(name) for name in CASES}, "gpu": preset_values("gpu", "rdma")}


def command_lines(found: list[Object]) -> list[tuple[str, list[str]]]:
    """Of containers, hooks and probes, with what the kubelet puts in for $(POD_IP)."""
    lines = []
    for name, pod in pods(found):
        for container in pod["spec"]["containers"]:
            lines.append((name, [*container["command"], *container["args"]]))
            actions = [container.get(kind, {}) for kind in ("startupProbe", "readinessProbe", "livenessProbe")]
            actions.append(container.get("lifecycle", {}).get("preStop", {}))
            lines += [(name, action["exec"]["command"]) for action in actions if "exec" in action]
    return [(name, [word.replace("$(POD_IP)", "10.0.0.7") for word in line]) for name, line in lines]


def parsed(line: list[str]) -> argparse.Namespace:
    assert line[0] == "tandem"
    return build_parser(line[1]).parse_args(line[1:])


@pytest.mark.parametrize("case", VALUES)
def test_the_cli_parses_every_command_line(case: str) -> None:
    lines = command_lines(objects(VALUES[case]))
    used = {parsed(line).command for _, line in lines}
    assert {"head", "node", "leave", "router"} <= used
    for command in used:
        assert callable(importlib.import_module(COMMANDS[command].module).run)


@pytest.mark.parametrize("case", VALUES)
def test_the_configuration_is_one_that_the_head_takes(case: str, tmp_path: Path) -> None:
    found = objects(VALUES[case])
    text = next(thing["data"]["cluster.json"] for thing in found if thing["kind"] == "ConfigMap")
    config = load(ClusterConfig, text)
    assert config.worker.host == ""
    assert config.trust.secret_file == "/etc/tandem/cluster/cluster-secret"
    assert config.tracing.otlp_endpoint == VALUES[case].get("tracing", {}).get("otlpEndpoint", "")
    secret, settings = tmp_path / "secret", tmp_path / "cluster.json"
    secret.write_text("0123456789abcdef")
    here = json.loads(text)
    here["trust"] = {"secret_file": str(secret)}  # the Secrets of TLS are not here
    here["worker"]["model"]["path"] = ""  # nor is the volume
    settings.write_text(json.dumps(here))
    line = next(line for name, line in command_lines(found) if name.startswith("StatefulSet/"))
    args = parsed([word.replace("/etc/tandem/config/cluster.json", str(settings)) for word in line])
    assert head_config(args).worker.trust.secret.reveal() == "0123456789abcdef"


@pytest.mark.parametrize("case", VALUES)
def test_the_settings_are_ones_that_the_router_takes(case: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef")
    line = next(line for name, line in command_lines(objects(VALUES[case])) if name.endswith("-router"))
    args = parsed([word.replace("/etc/tandem/cluster/cluster-secret", str(secret)) for word in line])
    config = router_config(args)
    assert (config.host, config.grpc_port, config.http_port) == ("0.0.0.0", 50051, 8000)
    assert config.trust.secret.reveal() == "0123456789abcdef"
    assert (config.tls != TlsConfig()) == ("tls" in VALUES[case].get("router", {}))
    assert config.model == VALUES[case].get("model", {}).get("source", "")
    assert config.connection_age_s == VALUES[case].get("router", {}).get("connectionAgeSeconds", 300)
    assert config.tracing.otlp_endpoint == VALUES[case].get("tracing", {}).get("otlpEndpoint", "")


def test_budgets_are_bytes() -> None:
    text = next(thing["data"]["cluster.json"] for thing in objects(preset_values("gpu")) if thing["kind"] == "ConfigMap")
    assert load(ClusterConfig, text).worker.cache.budget_bytes == 60 * 2**30


def test_nodes_offer_one_unit_of_their_role() -> None:
    units = {}
    for name, line in command_lines(objects(case_values("default"))):
        args = parsed(line)
        if args.command == "node":
            offer = next(
                w for w in node_command(args.head, args.host, {f"tandem_{args.role}": 1}) if w.startswith("--resources=")
            )
            units[name.rpartition("-")[2]] = json.loads(offer.partition("=")[2])
    assert units == {"prefill": {"tandem_prefill": 1}, "decode": {"tandem_decode": 1}}


def test_ray_takes_the_command_lines_of_head_and_node() -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    from ray.scripts.scripts import start

    for command in (head_command("10.0.0.7", 6379), node_command("head:6379", "10.0.0.8", {"tandem_decode": 1})):
        words = command[command.index("start") + 1 :]
        context = start.make_context("start", words)
        assert context.params["block"] is True
