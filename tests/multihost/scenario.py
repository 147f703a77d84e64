"""A request served across hosts; a host cut off and healed, seen and survived; one drained and taken back; one that leaves."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.multihost.cluster import MultihostCluster, multihost_cluster
from tests.multihost.hosts import Kept

_START_S = 150.0
_NOTICE_S = 30.0
_GIVE_UP_S = 90.0
_RETURN_S = 150.0
_LONG_TOKENS = 400
PROMPT = "Once upon a time there was a cluster of several hosts"


def run_scenario(folder: Path) -> Iterator[str]:
    """Yields what was found, in lines for people. Raises AssertionError."""
    with multihost_cluster(folder) as cluster:
        yield from _serve(cluster)
        yield from _cut_and_heal(cluster)
        yield from _drain_and_undo(cluster)
        yield from _leave(cluster)


def _decoding(cluster: MultihostCluster) -> Kept:
    """The node whose worker decodes, once one does."""
    busy: list[str] = []

    def decodes() -> bool:
        workers = [w for w in cluster.status()["workers"] if w["role"] == "decode" and w["running"]]
        busy[:] = [w["address"].rpartition(":")[0] for w in workers]
        return bool(busy)

    cluster.until(decodes, "the long answer decodes", _NOTICE_S)
    return cluster.nodes[busy[0]]


def _whole(cluster: MultihostCluster) -> bool:
    ready = cluster.ready()
    return (len(ready["prefill"]), len(ready["decode"])) == (1, 2)


def _serve(cluster: MultihostCluster) -> Iterator[str]:
    yield f"all workers ready after {cluster.until(lambda: _whole(cluster), 'all workers ready', _START_S):.1f} s"
    workers = cluster.status()["workers"]
    hosts = {worker["address"].rpartition(":")[0] for worker in workers}
    assert hosts == set(cluster.nodes), hosts
    begin_s = time.monotonic()
    answer = cluster.generate(PROMPT, 32)
    assert answer["usage"]["completion_tokens"] == 32
    yield f"32 tokens across hosts in {time.monotonic() - begin_s:.1f} s (with the client's start)"
    transports = {
        worker["transport"] for worker in cluster.status()["workers"] if worker["running"] or worker["role"] == "prefill"
    }
    assert all("tcp" in transport for transport in transports), transports
    yield f"transport in use: {', '.join(sorted(transports))}"


def _cut_and_heal(cluster: MultihostCluster) -> Iterator[str]:
    wanted = cluster.generate(PROMPT, _LONG_TOKENS)["token_ids"]
    stream = cluster.head.start(*cluster.generate_arguments(PROMPT, _LONG_TOKENS), stdout=subprocess.PIPE)
    node = _decoding(cluster)
    host, starts = node.host, node.starts
    cluster.net.cut(host)
    cut_s = time.monotonic()
    out, _ = stream.communicate(timeout=120.0)
    yield f"{host.address} cut off while it decoded: the answer was whole {time.monotonic() - cut_s:.1f} s later"
    assert json.loads(out)["token_ids"] == wanted, "tokens were lost, repeated or changed"
    assert cluster.generate(PROMPT, 16)["token_ids"] == wanted[:16]
    seen = cluster.until(lambda: host.address not in cluster.ready()["decode"], "the router takes it off", _NOTICE_S)
    yield f"the host was off the list of ready workers {seen:.1f} s after the answer"
    # Longer than Ray waits: the node is declared dead, and what runs on it must not come back as it was.
    left_s = 40.0 - (time.monotonic() - cut_s)
    time.sleep(max(0.0, left_s))
    cluster.net.heal(host)
    healed = cluster.until(lambda: _whole(cluster), "the healed host serves again", _RETURN_S)
    again = node.starts - starts
    yield f"healed after 40 s: all workers ready {healed:.1f} s later; the node started anew {again} times"
    assert cluster.generate(PROMPT, 16)["token_ids"] == wanted[:16]


def _drain_and_undo(cluster: MultihostCluster) -> Iterator[str]:
    """A host is drained while it decodes: it has no worker then until that is undone, whatever it offers."""
    wanted = cluster.generate(PROMPT, _LONG_TOKENS)["token_ids"]
    stream = cluster.head.start(*cluster.generate_arguments(PROMPT, _LONG_TOKENS), stdout=subprocess.PIPE)
    address = _decoding(cluster).host.address
    begin_s = time.monotonic()
    router = ("--address", cluster.address)
    said = cluster.head.run("drain", "--node", address, "--timeout", "2", *router)
    yield f"`tandem drain --node` of a host that decoded: {said.strip()}, after {time.monotonic() - begin_s:.1f} s"
    out, _ = stream.communicate(timeout=120.0)
    assert json.loads(out)["token_ids"] == wanted, "tokens were lost, repeated or changed"
    status = cluster.status()
    assert status["cordoned"] == [address]
    assert address not in {worker["address"].rpartition(":")[0] for worker in status["workers"]}
    assert (status["pools"]["decode"]["wanted"], status["pools"]["decode"]["reason"]) == (1, "")
    cluster.head.run("drain", "--node", address, "--undo", *router)
    back = cluster.until(lambda: _whole(cluster), "the host has a worker again", _RETURN_S)
    yield f"undone: all workers ready {back:.1f} s later"


def _leave(cluster: MultihostCluster) -> Iterator[str]:
    """SIGTERM to a node while it decodes: the answer ends whole, then the node does."""
    wanted = cluster.generate(PROMPT, _LONG_TOKENS)["token_ids"]
    stream = cluster.head.start(*cluster.generate_arguments(PROMPT, _LONG_TOKENS), stdout=subprocess.PIPE)
    node = _decoding(cluster)
    (worker,) = [w["id"] for w in cluster.status()["workers"] if w["address"].startswith(f"{node.host.address}:")]
    begin_s = time.monotonic()
    said = node.host.run("leave", timeout_s=60.0)
    yield f"`tandem leave` at a host that decoded: {said.strip()}, after {time.monotonic() - begin_s:.1f} s"
    out, _ = stream.communicate(timeout=120.0)
    assert json.loads(out)["token_ids"] == wanted, "tokens were lost, repeated or changed"
    told = [event["kind"] for event in cluster.status()["events"] if event["subject"] == worker]
    assert "drained" in told, told
    assert "lost" not in told, told
