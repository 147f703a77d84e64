"""Follows the controller's membership. When the controller is away, the last membership stays in force."""

from __future__ import annotations

import asyncio
import logging

import grpc.aio

from router.fleet import ClusterEvent, Fleet, Member, Membership, PoolWish
from router.model import ModelInfo
from router.worker import WorkerInfo
from tandem.errors import TandemError
from tandem.rpc import create_internal_channel
from tandem.trust import Trust
from tandem.v1 import worker_pb2 as pb
from tandem.v1 import worker_pb2_grpc as pb_grpc

__all__ = ["follow", "membership_of", "worker_of"]

log = logging.getLogger(__name__)

_BACKOFF_S = 0.1
_BACKOFF_MAX_S = 5.0


async def follow(address: str, router_id: str, trust: Trust, fleet: Fleet) -> None:
    """Apply every membership that the controller at `address` publishes, until cancelled."""
    backoff_s = _BACKOFF_S
    async with create_internal_channel(address, trust) as channel:
        while True:
            try:
                async for snapshot in pb_grpc.MembershipStub(channel).Watch(pb.WatchRequest(router_id=router_id)):
                    await fleet.apply(membership_of(snapshot))
                    backoff_s = _BACKOFF_S
                reason = "it ended the stream"
            except grpc.aio.AioRpcError as error:
                reason = error.details() or error.code().name
            except TandemError as error:
                reason = str(error)
            log.warning("controller %s: %s; going on with the last membership, again in %.1f s", address, reason, backoff_s)
            await asyncio.sleep(backoff_s)
            backoff_s = min(_BACKOFF_MAX_S, backoff_s * 2)


def membership_of(snapshot: pb.MembershipSnapshot) -> Membership:
    members = tuple(Member(worker_of(member.worker), member.state == "draining") for member in snapshot.members)
    pools = {
        role: PoolWish(pool.wanted, pool.reason, pool.offered, pool.starting, pool.draining)
        for role, pool in snapshot.pools.items()
    }
    events = tuple(ClusterEvent(e.number, e.time_s, e.kind, e.subject, e.text) for e in snapshot.events)
    return Membership(members, pools, events, tuple(snapshot.cordoned))


def worker_of(worker: pb.WorkerDescription) -> WorkerInfo:
    model = worker.model
    return WorkerInfo(
        id=worker.worker_id,
        role=worker.role,
        address=worker.address,
        model=ModelInfo(
            name=model.name,
            fingerprint=model.fingerprint,
            max_context_tokens=model.max_context_tokens,
            block_size_tokens=model.block_size_tokens,
            vocab_size=model.vocab_size,
            tokenizer_path=model.tokenizer_path,
        ),
        pid=worker.pid,
        node=worker.node,
        transport=worker.transport,
        kv_blocks_total=worker.kv_blocks_total,
        state_slots_total=worker.state_slots_total,
        metrics_address=worker.metrics_address,
        block_bytes=worker.block_bytes,
        state_bytes=worker.state_bytes,
    )
