"""A worker or router without the cluster's secret, or with another, is refused in each of the three directions."""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator
from dataclasses import replace

import grpc.aio
import psutil
import pytest

from controller.controller import Controller
from controller.fake_launcher import FakeLauncher
from controller.membership import MembershipServer
from decode_worker.host import DecodeHost
from prefill_worker.host import PrefillHost
from router.fleet import Fleet
from router.handles import GrpcWorkerHandle
from router.membership import follow, worker_of
from router.state import WorkerTable
from tandem.config import TrustConfig
from tandem.errors import ConfigError
from tandem.request import Request, SamplingParams, StopRules
from tandem.rpc import create_channel, create_internal_channel
from tandem.secret import Secret
from tandem.tokenizer import Tokenizer
from tandem.trust import Trust
from tandem.v1 import worker_pb2 as pb
from tandem.v1 import worker_pb2_grpc as pb_grpc
from tests.local_cluster import SECRET, SMALL, local_cluster, until
from transfer.nixl_agent import NixlAgent

OTHER = Trust(Secret("of quite another cluster"))


@contextlib.asynccontextmanager
async def decode_host() -> AsyncIterator[DecodeHost]:
    host = await DecodeHost.start(f"decode-{id(asyncio.current_task())}", SMALL, NixlAgent)
    try:
        yield host
    finally:
        await host.stop()


async def test_a_worker_without_a_secret_does_not_start() -> None:
    for kind in (PrefillHost, DecodeHost):
        with pytest.raises(ConfigError, match="no cluster secret"):
            await kind.start("nameless", replace(SMALL, trust=TrustConfig()), NixlAgent)


async def test_a_router_with_another_secret_gets_no_session(caplog: pytest.LogCaptureFixture) -> None:
    async with decode_host() as host:
        info = worker_of(host.worker.description)
        stranger = GrpcWorkerHandle(info, "router-1", OTHER, lambda: pytest.fail("it is not connected"))
        friend = GrpcWorkerHandle(info, "router-2", Trust(SECRET), lambda: None)
        await until(lambda: friend.load is not None and "refuses this router" in caplog.text, 10.0)
        assert stranger.load is None
        await stranger.close()
        await friend.close()
    for secret in (SECRET, OTHER.secret):
        assert secret.reveal() not in caplog.text


@pytest.mark.parametrize("trust", [None, OTHER], ids=["none", "another"])
async def test_a_prefill_worker_with_another_secret_can_neither_pair_nor_reserve_nor_release(trust: Trust | None) -> None:
    async with decode_host() as host:
        address = host.worker.description.address
        async with create_internal_channel(address, trust) if trust else create_channel(address) as channel:
            stub = pb_grpc.DecodeWorkerStub(channel)
            for call in (
                stub.Describe(pb.DescribeRequest()),
                stub.Pair(pb.PairRequest(writer=host.worker.description)),
                stub.Reserve(pb.ReserveRequest(writer_id="prefill-1")),
                stub.Release(pb.ReleaseRequest(lease_id="x", writer_id="prefill-1")),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_whole_prefill_worker_with_another_secret_is_told_why_it_is_not_paired() -> None:
    async with decode_host() as decode:
        other = replace(SMALL, trust=TrustConfig(OTHER.secret))
        prefill = await PrefillHost.start(f"prefill-{id(decode)}", other, NixlAgent)
        try:
            refused = await prefill.worker.connect([decode.worker.description])
        finally:
            await prefill.stop()
        ((worker_id, reason),) = refused
        assert worker_id == decode.worker.worker_id
        assert "another cluster secret" in reason


async def test_a_router_with_another_secret_does_not_see_the_membership(caplog: pytest.LogCaptureFixture) -> None:
    controller = Controller(FakeLauncher({"prefill": 1, "decode": 1}), {"prefill": 1, "decode": 1}, "{}")
    running = asyncio.create_task(controller.run())
    server = await MembershipServer.start(controller, "127.0.0.1", Trust(SECRET))
    async with create_internal_channel(server.address, Trust(SECRET)) as channel:
        watching = pb_grpc.MembershipStub(channel).Watch(pb.WatchRequest(router_id="friend"))
        assert (await watching.read()).version > 0
        watching.cancel()
    fleet = Fleet(WorkerTable(), lambda info: pytest.fail("nothing is known to it"), Tokenizer.load)
    following = asyncio.create_task(follow(server.address, "router-1", OTHER, fleet))
    await until(lambda: "another cluster secret" in caplog.text, 10.0)
    assert not fleet.pools
    following.cancel()
    await asyncio.wait([following])
    await controller.shutdown()
    await running
    await server.stop()


@pytest.mark.slow
async def test_a_cluster_in_one_process_listens_on_loopback_only() -> None:
    async with local_cluster() as cluster:
        request = Request("r", (1, 2, 3), SamplingParams(), StopRules(4))
        assert len((await cluster.generate(request)).tokens) == 4
        addresses = listening(os.getpid())
        assert len(addresses) >= 3
        assert {address for address in addresses if not is_loopback(address)} == set()


def listening(pid: int) -> list[str]:
    """Addresses on which a process accepts connections."""
    return [c.laddr.ip for c in psutil.Process(pid).net_connections("inet") if c.status == psutil.CONN_LISTEN]


def is_loopback(address: str) -> bool:
    return address.removeprefix("::ffff:").startswith("127.") or address == socket.inet_ntop(
        socket.AF_INET6, b"\0" * 15 + b"\1"
    )


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
