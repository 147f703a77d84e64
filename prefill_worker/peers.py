"""The decode workers as a prefill worker sees them: paired once, asked for reservations, told when writes are quiet."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from prefill_worker.inbox import ReservationEnded
from prefill_worker.prompt import PrefillTask
from tandem.description import check_same_model
from tandem.errors import HandoffError, InvalidRequest, NoRoom, PeerRefused, TandemError
from tandem.rpc import create_internal_channel
from tandem.trust import Trust
from tandem.v1 import worker_pb2 as pb
from tandem.v1 import worker_pb2_grpc as pb_grpc
from tandem.wire import request_to_wire
from transfer.handoff import LeaseGrant
from transfer.layout import CacheLayout
from transfer.sender import Sender

__all__ = ["DecodePeers"]

logger = logging.getLogger(__name__)

_CALL_TIMEOUT_S = 5.0
_RELEASE_TRIES = 5
_BACKOFF_FIRST_S = 0.01
_BACKOFF_MAX_S = 0.2


@dataclass(frozen=True)
class _Peer:
    channel: grpc.aio.Channel
    stub: pb_grpc.DecodeWorkerStub


class DecodePeers:
    """Lives on the event loop. `reserve` and `release` may be called from the step loop's thread and return at once.

    A full decode worker is asked again, with growing pauses, for up to `patience_s`: then the router may choose another.
    """

    def __init__(
        self,
        sender: Sender,
        layout: CacheLayout,
        loop: asyncio.AbstractEventLoop,
        deliver: Callable[[ReservationEnded], None],
        patience_s: float,
        trust: Trust,
    ) -> None:
        self._sender = sender
        self._layout = layout
        self._loop = loop
        self._deliver = deliver
        self._patience_s = patience_s
        self._trust = trust
        self._peers: dict[str, _Peer] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def pair(self, ours: pb.WorkerDescription, agent_metadata: bytes, theirs: pb.WorkerDescription) -> None:
        """Check that both fit, exchange metadata, connect, prepare the descriptor lists. Idempotent.

        Raises:
            PeerRefused: the peer differs in model or layout, or cannot be reached.
        """
        if theirs.worker_id in self._peers:
            return
        check_same_model(ours.model, theirs.model)
        channel = create_internal_channel(theirs.address, self._trust)
        stub = pb_grpc.DecodeWorkerStub(channel)
        request = pb.PairRequest(writer=ours, layout_digest=self._layout.digest, agent_metadata=agent_metadata)
        try:
            reply = await stub.Pair(request, timeout=_CALL_TIMEOUT_S)
            layout = CacheLayout.from_wire(reply.regions, self._layout)
            await asyncio.to_thread(self._sender.connect, theirs.worker_id, reply.agent_metadata, layout)
        except grpc.aio.AioRpcError as error:
            await channel.close()
            raise PeerRefused(f"{theirs.worker_id} at {theirs.address}: {error.details()}") from error
        except TandemError as error:
            await channel.close()
            raise PeerRefused(f"{theirs.worker_id} at {theirs.address}: {error}") from error
        self._peers[theirs.worker_id] = _Peer(channel, stub)

    async def unpair(self, worker_id: str, *, dead: bool) -> None:
        """dead: the peer's process is known to be gone, so nothing waits for what was under way."""
        peer = self._peers.pop(worker_id, None)
        if peer is not None:
            self._sender.disconnect(worker_id, dead=dead)
            await peer.channel.close()

    async def close(self) -> None:
        for worker_id in list(self._peers):
            await self.unpair(worker_id, dead=False)

    def reserve(self, task: PrefillTask, writer_id: str) -> None:
        self._spawn(self._reserve(task, writer_id))

    def release(self, grant: LeaseGrant, writer_id: str, reason: str, record_sent: bool) -> None:
        request = pb.ReleaseRequest(
            lease_id=grant.lease_id, epoch=grant.epoch, writer_id=writer_id, reason=reason, record_sent=record_sent
        )
        self._spawn(self._release(grant.peer_id, request))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        def start() -> None:
            task = self._loop.create_task(coroutine)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        self._loop.call_soon_threadsafe(start)

    async def _reserve(self, task: PrefillTask, writer_id: str) -> None:
        outcome: LeaseGrant | TandemError
        try:
            outcome = await self._reserve_patiently(task, writer_id)
        except TandemError as error:
            outcome = error
        self._deliver(ReservationEnded(task.key, outcome))

    async def _reserve_patiently(self, task: PrefillTask, writer_id: str) -> LeaseGrant:
        deadline_s = self._loop.time() + self._patience_s
        pause_s = _BACKOFF_FIRST_S
        while True:
            try:
                return await self._reserve_once(task, writer_id)
            except NoRoom:
                if self._loop.time() + pause_s > deadline_s:
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _BACKOFF_MAX_S)

    async def _reserve_once(self, task: PrefillTask, writer_id: str) -> LeaseGrant:
        peer = self._peers.get(task.decode_worker_id)
        if peer is None:
            raise HandoffError(f"decode worker {task.decode_worker_id} is not paired with this prefill worker")
        wire = request_to_wire(task.request, task.attempt, task.router_id)
        try:
            reply = await peer.stub.Reserve(pb.ReserveRequest(request=wire, writer_id=writer_id), timeout=_CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise _reserve_error(task.decode_worker_id, error) from error
        return LeaseGrant(
            peer_id=task.decode_worker_id,
            lease_id=reply.lease_id,
            epoch=reply.epoch,
            nonce=reply.nonce,
            block_ids=tuple(reply.block_ids),
            slot=reply.slot,
        )

    async def _release(self, peer_id: str, request: pb.ReleaseRequest) -> None:
        """Told until heard: otherwise the memory stays in quarantine until this worker is declared dead."""
        for number in range(_RELEASE_TRIES):
            peer = self._peers.get(peer_id)
            if peer is None:
                return
            try:
                await peer.stub.Release(request, timeout=_CALL_TIMEOUT_S)
                return
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    logger.debug("release of lease %s: %s", request.lease_id, error.details())
                    return
            await asyncio.sleep(_BACKOFF_MAX_S * 2**number)
        logger.warning("decode worker %s did not hear that lease %s is quiet", peer_id, request.lease_id)


def _reserve_error(worker_id: str, error: grpc.aio.AioRpcError) -> TandemError:
    details = error.details() or error.code().name
    match error.code():
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return NoRoom(details)
        case grpc.StatusCode.INVALID_ARGUMENT:
            return InvalidRequest("request", details)
        case _:
            return HandoffError(f"decode worker {worker_id} gave no reservation: {details}")
