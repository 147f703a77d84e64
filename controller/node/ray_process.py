"""`ray start` as a child: its command line (pure), its end, and whether the head can be reached.

Started with --block, it ends when one of the node's processes does, so a broken node shows as an ended child. Ray's own
answer to SIGTERM is to end the node's actors within about a second: whoever stops the child has let the worker finish before.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from tandem.child import module_command
from tandem.errors import TandemError
from tandem.secret import Secret

__all__ = [
    "OBJECT_STORE_BYTES",
    "RAY_ENVIRONMENT",
    "RayProcess",
    "head_command",
    "is_reachable",
    "node_command",
    "token_environment",
]

OBJECT_STORE_BYTES = 80 * 1024 * 1024  # Ray's smallest: nothing of ours passes through it
_STOP_S = 20.0
_KILL_S = 5.0
_REACH_S = 2.0
# Read by Ray's processes when they start. Its workers' niceness of 15 would let every other process go first. A worker takes no
# unit of what Ray calls GPU, and must see the devices nevertheless. Ray's measuring of itself, and its record of tasks for its
# dashboard, are read by nobody here and cost an idle worker a tenth of its processor time. Under `uv run` it would pack the
# current folder and put it first on the workers' search path.
RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",
    "RAY_event_stats": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}
# A head starts a server for Ray's own clients with `python -m`, which would begin its search path with the current folder.
_SAFE_PATH = {"PYTHONSAFEPATH": "1"}
_RAY = "ray.scripts.scripts"
_COMMON = ("--num-gpus=0", f"--object-store-memory={OBJECT_STORE_BYTES}", "--include-log-monitor=false", "--block")


def head_command(host: str, port: int) -> list[str]:
    """The first node of a cluster, with its tables, on `host`:`port`; it offers no worker a place."""
    place = ("--head", f"--node-ip-address={host}", f"--port={port}", "--include-dashboard=false")
    return module_command(_RAY, "start", *place, "--num-cpus=0", *_COMMON)


def node_command(head: str, host: str, resources: Mapping[str, int]) -> list[str]:
    """A node at `host` that joins the head at `head` (host:port) and offers `resources`."""
    offer = "--resources=" + json.dumps(dict(resources))
    place = (f"--address={head}", f"--node-ip-address={host}", "--num-cpus=1")
    return module_command(_RAY, "start", *place, offer, *_COMMON)


def token_environment(secret: Secret) -> dict[str, str]:
    """What makes Ray's processes know each other. Whoever reaches Ray's ports may run code as we do, so a cluster of ours
    always asks for a token; it follows from the cluster secret, which cannot be found from it."""
    token = hmac.new(secret.reveal().encode(), b"tandem: ray's token", hashlib.sha256).hexdigest()
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}


def is_reachable(address: tuple[str, int]) -> bool:
    """Somebody accepts connections there; waits for two seconds at most."""
    try:
        socket.create_connection(address, timeout=_REACH_S).close()
    except OSError:
        return False
    return True


@dataclass(slots=True)
class RayProcess:
    """command: see `head_command`, `node_command`. environment: more variables, see `token_environment`."""

    command: list[str]
    environment: Mapping[str, str]
    _process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """In a process group of its own, so that a signal to ours does not end the workers. What it says goes to stderr."""
        environment = {**os.environ, **RAY_ENVIRONMENT, **_SAFE_PATH, **self.environment}
        environment.pop("RAY_ADDRESS", None)  # `ray start` refuses to begin a cluster where one is named
        environment.pop("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", None)  # `up` sets it to keep to loopback: this one spans hosts
        try:
            self._process = subprocess.Popen(
                self.command, env=environment, stdin=subprocess.DEVNULL, stdout=sys.stderr, process_group=0
            )
        except OSError as error:
            raise TandemError(f"the Ray node cannot be started: {error.strerror or error}") from error

    def ended(self) -> int | None:
        """Its exit status when it is no more."""
        return self._process.poll() if self._process else None

    def stop(self) -> None:
        """End the node and its actors; bounded."""
        if self._process is None or self.ended() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_KILL_S)
