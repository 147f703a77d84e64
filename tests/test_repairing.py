"""A pair of workers whose connection broke, or could not be made at first, serves again.

Real NIXL, real gRPC, real workers: only the writer's agent is dressed up to lose connections when told.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc.aio
import pytest
import pytest_asyncio

from tandem.config import TransferConfig
from tandem.errors import PeerRefused, TransferFailed
from tandem.request import Request, SamplingParams, StopRules
from tests.local_cluster import LocalCluster, local_cluster, until
from transfer.agent import XferHandle
from transfer.layout import CacheLayout
from transfer.nixl_agent import NixlAgent
from transfer.plan import Indices

pytestmark = pytest.mark.slow

REQUEST = Request("r", tuple(range(7, 107)), SamplingParams(), StopRules(8))


class FragileAgent(NixlAgent):
    """break_writes: so many writes fail. refuse_peers: so many connections cannot be begun. lose_peers: connections that the
    library itself drops before the next write, as it does when the peer's end breaks."""

    def __init__(self, name: str, config: TransferConfig) -> None:
        super().__init__(name, config)
        self.break_writes = 0
        self.refuse_peers = 0
        self.lose_peers = 0
        self.num_added = 0

    def add_peer(self, metadata: bytes, remote: CacheLayout) -> str:
        if self.refuse_peers > 0:
            self.refuse_peers -= 1
            raise PeerRefused("scripted: the peer cannot be reached")
        self.num_added += 1
        return super().add_peer(metadata, remote)

    def post_write(self, peer: str, local: Indices, remote: Indices) -> XferHandle:
        if self.break_writes > 0:
            self.break_writes -= 1
            raise TransferFailed("scripted: the write cannot be posted")
        if self.lose_peers > 0:
            self.lose_peers -= 1
            self._nixl.remove_remote_agent(peer)
        return super().post_write(peer, local, remote)


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[LocalCluster]:
    async with local_cluster(make_prefill_agent=FragileAgent) as running:
        yield running


def agent_of(cluster: LocalCluster, number: int = 0) -> FragileAgent:
    agent = cluster.prefill[number].worker.agent
    assert isinstance(agent, FragileAgent)
    return agent


@pytest.mark.parametrize("how", ["break_writes", "lose_peers"])
async def test_a_broken_pair_is_paired_again_and_the_request_is_served_by_it(cluster: LocalCluster, how: str) -> None:
    expected = (await cluster.generate(REQUEST)).tokens
    for _ in range(3):
        setattr(agent_of(cluster), how, 1)
        answer = await cluster.generate(REQUEST)
        assert answer.tokens == expected
        assert answer.finished.attempts == 2
    assert agent_of(cluster).num_added == 4
    await cluster.until_whole()


async def test_a_pair_that_breaks_under_several_requests_serves_them_all(cluster: LocalCluster) -> None:
    expected = (await cluster.generate(REQUEST)).tokens
    agent_of(cluster).break_writes = 1
    answers = await asyncio.gather(*(cluster.generate(REQUEST) for _ in range(8)))
    assert [answer.tokens for answer in answers] == [expected] * 8
    await cluster.until_whole()


async def test_a_peer_that_cannot_be_reached_at_first_is_not_refused_and_serves_later() -> None:
    def unreachable_at_first(name: str, config: TransferConfig) -> FragileAgent:
        agent = FragileAgent(name, config)
        agent.refuse_peers = 3
        return agent

    async with local_cluster(make_prefill_agent=unreachable_at_first) as cluster:
        assert len((await cluster.generate(REQUEST)).tokens) == 8


async def test_a_pair_that_stays_broken_is_tried_for_as_long_as_both_live(cluster: LocalCluster) -> None:
    agent = agent_of(cluster)
    agent.break_writes, agent.refuse_peers = 1, 10**6
    with pytest.raises(grpc.aio.AioRpcError, match="no connection to decode worker"):
        await cluster.generate(REQUEST)
    agent.refuse_peers = 0
    await until(lambda: not cluster.prefill[0].worker.unreachable_peers(), 10.0)
    assert len((await cluster.generate(REQUEST)).tokens) == 8
    await cluster.until_whole()


async def test_a_peer_that_is_gone_is_not_tried_any_more(cluster: LocalCluster) -> None:
    worker, agent = cluster.prefill[0].worker, agent_of(cluster)
    agent.break_writes, agent.refuse_peers = 1, 10**6
    with pytest.raises(grpc.aio.AioRpcError):
        await cluster.generate(REQUEST)
    await worker.disconnect(cluster.decode[0].worker.worker_id)
    tried = agent.refuse_peers
    assert worker.unreachable_peers() == {}
    with pytest.raises(grpc.aio.AioRpcError, match="not paired"):
        await cluster.generate(REQUEST)
    assert agent.refuse_peers == tried
    await until(lambda: worker.load().kv_blocks_used == 0, 10.0)
