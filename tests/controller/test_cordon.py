"""A host that is drained gets no workers and lets those that it has finish; it stays so until that is undone."""

from __future__ import annotations

import pytest

from controller.controller import UnknownNode
from controller.events import EventKind
from controller.launcher import Node
from tandem.errors import InvalidRequest
from tests.controller.test_operating import Cluster, until

HERE, THERE = "10.0.0.1", "10.0.0.2"


def two_hosts(prefill: int = 1, decode: int = 2) -> Cluster:
    """Each has room for two workers of each pool; those of "here" are taken first."""
    cluster = Cluster(prefill, decode, units=2)
    cluster.launcher.others = [Node("there", THERE, "host-2", {"prefill": 2, "decode": 2})]
    return cluster


def nodes(cluster: Cluster, role: str) -> list[str]:
    return [worker.node_id for worker in cluster.running(role)]


@pytest.mark.parametrize("host", [HERE, "host-1"])
async def test_all_workers_of_a_drained_host_end_and_others_take_their_places_elsewhere(host: str) -> None:
    cluster = two_hosts()
    await cluster.controller.wait_ready(1, 2)
    old = {worker.worker_id for worker in cluster.launcher.workers}
    assert set(await cluster.controller.drain_node(host, 3.0)) == old
    await until(lambda: nodes(cluster, "decode") == ["there"] * 2 and nodes(cluster, "prefill") == ["there"])
    await cluster.controller.wait_ready(1, 2)
    assert all("stop 3" in worker.calls for worker in cluster.launcher.workers if worker.worker_id in old)
    assert cluster.told(EventKind.LOST) == []
    assert len(cluster.told(EventKind.DRAINED)) == 3
    assert cluster.told(EventKind.CORDONED) == [f"{HERE} gets no more workers: an operator drains it"]
    assert cluster.controller.overview().pools["decode"].reason == ""
    await cluster.end()


async def test_those_elsewhere_start_at_once_while_the_old_ones_still_finish() -> None:
    cluster = two_hosts(decode=1)
    await cluster.controller.wait_ready(1, 1)
    (old,) = cluster.launcher.of("decode")
    old.drained.clear()
    await cluster.controller.drain_node(HERE)
    await cluster.controller.wait_ready(1, 1)
    assert cluster.states()[old.worker_id] == "draining"
    assert (await cluster.members())[old.worker_id] == "draining"
    await cluster.end()


async def test_without_room_elsewhere_the_pool_is_smaller_and_says_why() -> None:
    cluster = Cluster(1, 1, units=2)
    await cluster.controller.wait_ready(1, 1)
    await cluster.controller.drain_node(HERE)
    await until(lambda: not cluster.states())
    await until(lambda: cluster.controller.overview().pools["decode"].reason == "1 wanted, nodes offer 0 units")
    await cluster.controller.uncordon(HERE)
    await cluster.controller.wait_ready(1, 1)
    assert cluster.told(EventKind.UNCORDONED) == [f"{HERE} may have workers again"]
    await cluster.end()


async def test_a_pool_as_large_as_what_nodes_offer_follows() -> None:
    cluster = two_hosts()
    await cluster.controller.scale({"decode": None})
    await cluster.controller.wait_ready(1, 4)
    await cluster.controller.drain_node(THERE)
    await until(lambda: nodes(cluster, "decode") == ["here"] * 2)
    assert cluster.controller.overview().pools["decode"].wanted == 2
    await cluster.end()


async def test_a_worker_that_starts_on_the_host_does_not_stay_there() -> None:
    cluster = two_hosts(decode=1)
    cluster.launcher.auto_start = False
    await until(lambda: len(cluster.launcher.workers) == 2)
    assert await cluster.controller.drain_node(HERE) == []  # where they are is not known yet
    for worker in list(cluster.launcher.workers):
        worker.let_start()
    cluster.launcher.auto_start = True
    cluster.controller.roster.news.set()
    await until(lambda: nodes(cluster, "decode") == nodes(cluster, "prefill") == ["there"])
    await cluster.end()


async def test_the_next_life_of_the_controller_keeps_to_it_and_so_does_a_node_that_comes_back() -> None:
    cluster = two_hosts(decode=1)
    await cluster.controller.wait_ready(1, 1)
    await cluster.controller.drain_node("host-1")
    await until(lambda: nodes(cluster, "decode") == ["there"])
    await cluster.crash()
    await cluster.come_back()
    await cluster.controller.scale({"decode": 2})
    await cluster.controller.wait_ready(1, 2)
    assert nodes(cluster, "decode") == ["there"] * 2
    snapshot = await cluster.controller.snapshot_after(0)
    assert list(snapshot.cordoned) == [HERE]
    await cluster.controller.uncordon("host-1")
    assert list((await cluster.controller.snapshot_after(snapshot.version)).cordoned) == []
    await cluster.end()


async def test_what_is_no_host_or_no_time_is_refused_by_name() -> None:
    cluster = two_hosts()
    await cluster.controller.wait_ready(1, 2)
    with pytest.raises(UnknownNode, match=r"no node 'elsewhere' is there; there are 10\.0\.0\.1, 10\.0\.0\.2"):
        await cluster.controller.drain_node("elsewhere")
    with pytest.raises(UnknownNode, match=r"'10\.0\.0\.1' is not among the hosts that get no workers \(none\)"):
        await cluster.controller.uncordon(HERE)
    with pytest.raises(InvalidRequest, match="timeout_s"):
        await cluster.controller.drain_node(HERE, -1.0)
    assert "draining" not in cluster.states().values()
    await cluster.end()
