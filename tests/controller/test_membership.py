"""Routers get the whole membership at once and again at every change, over gRPC, as long as they watch."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from controller.controller import Controller
from controller.fake_launcher import FakeLauncher
from controller.life import Timing
from controller.membership import MembershipServer
from tandem.rpc import create_internal_channel
from tandem.secret import Secret
from tandem.trust import Trust
from tandem.v1 import worker_pb2, worker_pb2_grpc

TRUST = Trust(Secret.make())


@pytest.fixture
async def launcher() -> FakeLauncher:
    return FakeLauncher({"prefill": 1, "decode": 1})


@pytest.fixture
async def controller(launcher: FakeLauncher) -> AsyncIterator[Controller]:
    timing = Timing(look_s=30, progress_s=0, ping_s=30, stop_s=1, kill_s=1, answer_s=1, connect_s=1)
    controller = Controller(launcher, {"prefill": 1, "decode": 1}, "{}", timing=timing)
    loop = asyncio.create_task(controller.run())
    await controller.wait_ready(1, 1)
    yield controller
    await controller.shutdown()
    await loop


@pytest.fixture
async def watch(controller: Controller) -> AsyncIterator[Any]:
    server = await MembershipServer.start(controller, "127.0.0.1", TRUST)
    async with create_internal_channel(server.address, TRUST) as channel:
        yield worker_pb2_grpc.MembershipStub(channel).Watch
    await server.stop()


def ids(snapshot: worker_pb2.MembershipSnapshot) -> set[str]:
    return {member.worker.worker_id for member in snapshot.members}


async def test_a_watcher_gets_everything_at_once_and_then_every_change(launcher: FakeLauncher, watch: Any) -> None:
    stream = aiter(watch(worker_pb2.WatchRequest(router_id="r")))
    async with asyncio.timeout(5):
        first = await anext(stream)
        assert ids(first) == {worker.worker_id for worker in launcher.workers}
        assert first.pools["prefill"].wanted == 1
        dead = launcher.of("decode")[0]
        dead.die()
        versions = [first.version]
        async for snapshot in stream:
            versions.append(snapshot.version)
            if ids(snapshot) == {launcher.of("prefill")[0].worker_id, launcher.of("decode")[-1].worker_id} - {dead.worker_id}:
                break
        assert dead.worker_id not in ids(snapshot)
    assert versions == sorted(set(versions))


async def test_watchers_do_not_disturb_each_other(watch: Any) -> None:
    async with asyncio.timeout(5):
        first, second = (watch(worker_pb2.WatchRequest(router_id=name)) for name in "ab")
        one, two = await anext(aiter(first)), await anext(aiter(second))
        assert one == two
        first.cancel()
        third = await anext(aiter(watch(worker_pb2.WatchRequest(router_id="c"))))
        assert third == one
