"""Follows the controller's membership for one node."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import grpc.aio

from controller.node.place import Seen
from tandem.rpc import create_internal_channel
from tandem.trust import Trust
from tandem.v1 import worker_pb2 as pb
from tandem.v1 import worker_pb2_grpc as pb_grpc

__all__ = ["watch"]

log = logging.getLogger(__name__)

_PAUSE_S = 1.0


async def watch(controller: str, watcher_id: str, trust: Trust, apply: Callable[[Sequence[Seen]], None]) -> None:
    """Call `apply` with every membership that the controller at `controller` publishes, until cancelled. While it cannot be
    reached, the last one stays in force."""
    told = ""
    async with create_internal_channel(controller, trust) as channel:
        while True:
            try:
                async for snapshot in pb_grpc.MembershipStub(channel).Watch(pb.WatchRequest(router_id=watcher_id)):
                    told = ""
                    apply([_seen(member) for member in snapshot.members])
                reason = "it ended the stream"
            except grpc.aio.AioRpcError as error:
                reason = error.details() or error.code().name
            if reason != told:
                log.warning("controller %s: %s; going on with the last membership", controller, reason)
                told = reason
            await asyncio.sleep(_PAUSE_S)


def _seen(member: pb.Member) -> Seen:
    worker = member.worker
    return Seen(worker.worker_id, worker.role, worker.address, worker.pid, member.state)
