"""A node is ready when its own worker serves, and leaves only after that worker has ended."""

import asyncio
from collections.abc import Sequence

import pytest
from starlette.testclient import TestClient

from controller.node.node import Node, NodeSettings
from controller.node.place import NodePhase, Seen, find_own
from controller.node.probes import probe_app
from tandem.clock import FakeClock

HERE, THERE = "10.0.0.7", "10.0.0.8"
SETTINGS = NodeSettings("decode", "head:6379", "head:6380", HERE, leave_s=30.0)


def seen(host: str = HERE, role: str = "decode", pid: int = 41, state: str = "ready") -> Seen:
    return Seen(f"{role}-{pid}", role, f"{host}:5000", pid, state)


class Fixture:
    """A node with processes that live in a set."""

    def __init__(self, *pids: int) -> None:
        self.running = set(pids)
        self.asked: list[int] = []
        self.clock = FakeClock()
        self.ends_after_s = 1.0
        self.node = Node(SETTINGS, self.running.__contains__, self.asked.append, self.clock, self.pause)

    async def pause(self, seconds: float) -> None:
        self.clock.advance(seconds)
        if self.clock.now() >= self.ends_after_s:
            self.running.difference_update(self.asked)


def test_a_node_serves_when_its_worker_is_in_the_membership() -> None:
    it = Fixture(41)
    assert it.node.phase is NodePhase.JOINING
    it.node.on_members([seen()])
    assert it.node.phase is NodePhase.JOINING  # of a former life: our Ray node does not run yet
    it.node.joined()
    it.node.on_members([])
    assert it.node.phase is NodePhase.STARTING
    it.node.on_members([seen(THERE, pid=41), seen(role="prefill", pid=41), seen()])
    assert it.node.phase is NodePhase.SERVING


@pytest.mark.parametrize("members", [[], [seen(state="draining")], [seen(pid=40)], [seen(THERE)]], ids=repr)
def test_it_stops_serving_with_its_worker(members: Sequence[Seen]) -> None:
    it = Fixture(41)
    it.node.joined()
    it.node.on_members([seen()])
    it.node.on_members(members)
    assert it.node.phase is NodePhase.STARTING


def test_a_worker_is_found_by_role_and_address() -> None:
    others = [seen(THERE, pid=1), seen(role="prefill", pid=2)]
    assert find_own(others, "decode", HERE) is None
    assert find_own([*others, seen(pid=3)], "decode", HERE) == seen(pid=3)
    six = Seen("decode-1", "decode", "[fd00::7]:5000", 4, "ready")
    assert find_own([six], "decode", "fd00::7") == six


async def test_leaving_waits_for_the_worker_to_end() -> None:
    it = Fixture(41)
    it.node.joined()
    it.node.on_members([seen()])
    await asyncio.gather(it.node.leave(), it.node.leave())
    assert it.asked == [41]
    assert it.clock.now() >= it.ends_after_s
    assert it.node.phase is NodePhase.GONE
    it.node.on_members([seen()])
    assert it.node.phase is NodePhase.GONE


async def test_leaving_is_bounded() -> None:
    it = Fixture(41)
    it.ends_after_s = 1e9
    it.node.joined()
    it.node.on_members([seen()])
    await it.node.leave()
    assert SETTINGS.leave_s < it.clock.now() < SETTINGS.leave_s + 1.0
    assert it.node.phase is NodePhase.GONE


async def test_a_node_without_a_worker_leaves_at_once_and_asks_no_stranger() -> None:
    it = Fixture(99)
    it.node.joined()
    it.node.on_members([seen(pid=98), seen(THERE, pid=99)])
    await it.node.leave()
    assert it.asked == []
    assert it.clock.now() == 0.0


def probes(node: Node, peer: str) -> TestClient:
    return TestClient(probe_app(lambda: node.phase, node.text, node.leave), client=(peer, 1234))


def test_readiness_follows_the_phase_and_says_why() -> None:
    it = Fixture(41)
    client = probes(it.node, THERE)
    assert client.get("/healthz").status_code == 200
    assert client.get("/readyz").status_code == 503
    it.node.joined()
    assert "decode worker is not in the membership" in client.get("/readyz").text
    it.node.on_members([seen()])
    assert client.get("/readyz").status_code == 200


@pytest.mark.parametrize(("peer", "status"), [("127.0.0.1", 200), ("::1", 200), (THERE, 403)])
def test_only_this_machine_may_ask_a_node_to_leave(peer: str, status: int) -> None:
    it = Fixture(41)
    it.node.joined()
    it.node.on_members([seen()])
    assert probes(it.node, peer).post("/leave").status_code == status
    assert (it.node.phase is NodePhase.GONE) == (status == 200)
    assert probes(it.node, peer).get("/leave").status_code == 405
