"""Prometheus itself, as a child process, and its promtool. `.ci/run` installs Debian's."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

__all__ = ["Prometheus", "Sample", "binary", "prometheus"]

_READY_S = 20.0


@dataclass(frozen=True, slots=True)
class Sample:
    labels: Mapping[str, str]
    value: float


def binary(name: str) -> str:
    """Path of `prometheus` or `promtool`. Skips the test, and says so, where it is not installed."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed (.ci/run does, from Debian): queries and alerts were not evaluated")
    return path


@dataclass(frozen=True, slots=True)
class Prometheus:
    url: str

    def query(self, expression: str) -> list[Sample]:
        """An instant vector now. Raises AssertionError: the expression is not accepted, or gives another type."""
        answer = self._get("query", query=expression)
        assert answer["resultType"] == "vector", (expression, answer["resultType"])
        return [Sample(found["metric"], float(found["value"][1])) for found in answer["result"]]

    def targets(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._get("targets")["activeTargets"]
        return found

    def _get(self, path: str, **parameters: str) -> Any:
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as reply:
                return json.loads(reply.read())["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error


@contextlib.contextmanager
def prometheus(folder: Path, config: Mapping[str, Any]) -> Iterator[Prometheus]:
    """Runs with `config`, its data below `folder`, until the end of the context."""
    program = binary("prometheus")
    (folder / "prometheus.yml").write_text(yaml.safe_dump(dict(config)))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    options = (
        *(f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"),
        *(f"--web.listen-address={address}", "--log.level=warn"),
    )
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen([program, *options], stdout=log, stderr=log)
    try:
        _until_ready(f"http://{address}", process, folder / "prometheus.log")
        yield Prometheus(f"http://{address}")
    finally:
        process.terminate()
        process.wait(20)


def _until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _READY_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/-/ready", timeout=1):
            return
        time.sleep(0.05)
    raise AssertionError(f"Prometheus does not answer: {log.read_text()}")
