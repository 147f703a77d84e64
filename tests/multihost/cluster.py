"""tandem on several hosts: the first runs head and router, the others one worker each."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem.model.random_checkpoint import random_checkpoint
from tests.multihost.hosts import Host, Kept, Network, network

_LOOK_S = 0.5
_SETTINGS = {
    # Between real hosts nothing but the network is there; on one machine UCX would find shared memory.
    "worker": {
        "model": {"path": str(random_checkpoint())},  # its answers do not end by themselves
        "threads": 1,
        "cache": {"budget_bytes": 64 << 20, "max_sequences": 8},
        "transfer": {"ucx_tls": "tcp", "timeout_s": 10.0},
        "drain_s": 5.0,
    },
}


@dataclass(slots=True)
class MultihostCluster:
    net: Network
    head: Host
    nodes: dict[str, Kept]  # by address
    others: list[Kept] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"{self.head.address}:50051"

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = json.loads(self.head.run("status", "--json", "--address", self.address))
        return status

    def ready(self) -> dict[str, list[str]]:
        """Addresses of hosts with a ready worker, by role."""
        found: dict[str, list[str]] = {"prefill": [], "decode": []}
        for worker in self.status()["workers"]:
            if worker["state"] == "ready":
                found[worker["role"]].append(worker["address"].rpartition(":")[0])
        return found

    def until(self, condition: Callable[[], object], what: str, timeout_s: float) -> float:
        """Seconds until `condition` held. Raises AssertionError after `timeout_s`."""
        begin_s = time.monotonic()
        while True:
            with contextlib.suppress(Exception):  # a router that does not answer yet
                if condition():
                    return time.monotonic() - begin_s
            assert time.monotonic() - begin_s < timeout_s, f"{what}: not within {timeout_s:.0f} s"
            time.sleep(_LOOK_S)

    def generate_arguments(self, prompt: str, num_tokens: int) -> Sequence[str]:
        length = ("--max-new-tokens", str(num_tokens), "--temperature", "0")
        return ("generate", prompt, *length, "--json", "--address", self.address)

    def generate(self, prompt: str, num_tokens: int) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.head.run(*self.generate_arguments(prompt, num_tokens)))
        return answer


@contextlib.contextmanager
def multihost_cluster(folder: Path, *, prefill: int = 1, decode: int = 2) -> Iterator[MultihostCluster]:
    secret, settings = folder / "secret", folder / "cluster.json"
    secret.write_text("of this test network only")
    settings.write_text(json.dumps(_SETTINGS))
    with network(1 + prefill + decode, folder) as net:
        head, *rest = net.hosts
        trust = ("--cluster-secret-file", str(secret))
        controller = f"{head.address}:6380"
        ports = ("--grpc-port", "50051", "--http-port", "8000")
        first = [
            Kept(head, ("head", "--host", head.address, "--config", str(settings), *trust)),
            Kept(head, ("router", "--controller", controller, "--host", head.address, *ports, *trust)),
        ]
        roles = ["prefill"] * prefill + ["decode"] * decode
        join = ("--head", f"{head.address}:6379", "--controller", controller, "--config", str(settings), *trust)
        nodes = {
            host.address: Kept(host, ("node", "--role", role, "--host", host.address, *join))
            for host, role in zip(rest, roles, strict=True)
        }
        cluster = MultihostCluster(net, head, nodes, first)
        kept = [*first, *nodes.values()]
        try:
            for process in kept:
                process.start()
            yield cluster
        finally:
            for process in reversed(kept):
                process.stop()
