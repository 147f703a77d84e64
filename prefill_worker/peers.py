"""The decode workers as a prefill worker sees them: paired for as long as they live, asked for reservations, told when
writes are quiet."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

import grpc
import grpc.aio

from prefill_worker.inbox import ReservationEnded
from prefill_worker.pairing import Ourselves, PeerLink
from prefill_worker.prompt import Key, PrefillTask
from tandem.errors import HandoffError, InvalidRequest, Leaving, NoRoom, TandemError, TransferFailed
from tandem.v1 import worker_pb2 as pb
from tandem.wire import request_to_wire
from transfer.handoff import LeaseGrant
from transfer.sender import Sender

__all__ = ["DecodePeers"]

T = TypeVar("T")
logger = logging.getLogger(__name__)

_CALL_TIMEOUT_S = 5.0
_FIRST_CONNECTION_S = 4.0
_RECONNECTION_S = 2.0
_BACKOFF_FIRST_S = 0.01
_BACKOFF_MAX_S = 0.2
_RELEASE_BACKOFF_MAX_S = 5.0
_FAREWELL_S = 2.0
# What the decode worker answers when it has decided. Any other status leaves open whether it holds a lease for us.
_DECISIONS = frozenset(
    {
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
    }
)


class DecodePeers:
    """Lives on the event loop. `reserve`, `release` and `broken` may be called from any thread and return at once.

    A full decode worker is asked again, with growing pauses, for up to `patience_s`: then the router may choose another.
    """

    def __init__(
        self,
        sender: Sender,
        loop: asyncio.AbstractEventLoop,
        deliver: Callable[[ReservationEnded], None],
        patience_s: float,
    ) -> None:
        self._sender = sender
        self._loop = loop
        self._deliver = deliver
        self._patience_s = patience_s
        self._links: dict[str, PeerLink] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._reserving: dict[Key, tuple[PrefillTask, asyncio.Task[LeaseGrant]]] = {}
        self._dead: set[str] = set()

    async def pair(self, ourselves: Ourselves, peer: pb.WorkerDescription) -> None:
        """Be able to write to `peer`, now if it answers, and again whenever the connection breaks. Idempotent.

        Raises:
            PeerRefused: the peer differs in model or layout.
        """
        if peer.worker_id in self._dead:
            return  # the news of its death overtook this call
        link = self._links.get(peer.worker_id)
        if link is None:
            link = self._links[peer.worker_id] = PeerLink(ourselves, peer)
        try:
            await link.settle(_FIRST_CONNECTION_S)
        except TandemError:
            await self.unpair(peer.worker_id, dead=False)
            raise

    async def unpair(self, worker_id: str, *, dead: bool) -> None:
        """dead: the peer's process is known to be gone, so nothing waits for what was under way."""
        if dead:
            self._dead.add(worker_id)
        link = self._links.pop(worker_id, None)
        if link is not None:
            self._sender.disconnect(worker_id, dead=dead)
            await link.close()

    def broken(self, worker_id: str, reason: str) -> None:
        """The sender has given up its connection to this peer."""

        def mark() -> None:
            if (link := self._links.get(worker_id)) is not None:
                link.break_off(reason)

        self._loop.call_soon_threadsafe(mark)

    def troubles(self) -> dict[str, str]:
        """Peers to which no hand-off may begin now, with the reason."""
        return {worker_id: link.trouble for worker_id, link in self._links.items() if link.trouble}

    async def close(self) -> None:
        """What is still to be said to peers is said, within a bound."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_FAREWELL_S)
        for task in self._tasks:
            task.cancel()
        for worker_id in list(self._links):
            await self.unpair(worker_id, dead=False)

    # ---- reservations ----

    def reserve(self, task: PrefillTask, writer_id: str) -> None:
        def start() -> None:
            asking = self._spawn(self._reserve_patiently(task, writer_id))
            self._reserving[task.key] = (task, asking)
            asking.add_done_callback(partial(self._reservation_ended, task))

        self._loop.call_soon_threadsafe(start)

    def withdraw(self, unwanted: Callable[[PrefillTask], bool]) -> None:
        """Stop asking for these. On the event loop."""
        for task, asking in self._reserving.values():
            if unwanted(task):
                asking.cancel()

    def _reservation_ended(self, task: PrefillTask, asking: asyncio.Task[LeaseGrant]) -> None:
        del self._reserving[task.key]
        self._deliver(ReservationEnded(task.key, _outcome(asking)))

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
        peer_id = task.decode_worker_id
        link = self._links.get(peer_id)
        if link is None:
            raise TransferFailed(f"decode worker {peer_id} is not paired with this prefill worker")
        await link.stand(_RECONNECTION_S)
        wire = request_to_wire(task.request, task.attempt, task.router_id)
        request = pb.ReserveRequest(request=wire, writer_id=writer_id, skips_held_blocks=True)
        decided = False
        try:
            reply = await link.stub.Reserve(request, timeout=_CALL_TIMEOUT_S)
            decided = True
        except grpc.aio.AioRpcError as error:
            decided = error.code() in _DECISIONS
            raise _reserve_error(peer_id, error) from error
        finally:
            if not decided:  # cancelled too: it may have reserved what nobody will ever write to
                self._tell(peer_id, pb.ReleaseRequest(writer_id=writer_id, reason="abandoned", abandoned=_abandoned(task)))
        return LeaseGrant(
            peer_id=peer_id,
            lease_id=reply.lease_id,
            epoch=reply.epoch,
            nonce=reply.nonce,
            block_ids=tuple(reply.block_ids),
            slot=reply.slot,
            num_held=reply.num_held_blocks,
        )

    # ---- releases ----

    def release(self, grant: LeaseGrant, writer_id: str, reason: str, record_sent: bool) -> None:
        request = pb.ReleaseRequest(
            lease_id=grant.lease_id, epoch=grant.epoch, writer_id=writer_id, reason=reason, record_sent=record_sent
        )
        self._loop.call_soon_threadsafe(self._tell, grant.peer_id, request)

    def _tell(self, peer_id: str, request: pb.ReleaseRequest) -> None:
        self._spawn(self._release(peer_id, request))

    async def _release(self, peer_id: str, request: pb.ReleaseRequest) -> None:
        """Told until heard, or until the peer is gone: the memory stays in quarantine for so long."""
        pause_s = _BACKOFF_MAX_S
        while (link := self._links.get(peer_id)) is not None:
            try:
                await link.stub.Release(request, timeout=_CALL_TIMEOUT_S)
                return
            except grpc.aio.AioRpcError as error:
                if error.code() in _DECISIONS:
                    logger.debug("release of lease %s: %s", request.lease_id, error.details())
                    return
                logger.info("decode worker %s has not heard that a lease is quiet: %s", peer_id, error.details())
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _RELEASE_BACKOFF_MAX_S)

    def _spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _outcome(asking: asyncio.Task[LeaseGrant]) -> LeaseGrant | TandemError:
    if asking.cancelled():
        return HandoffError("the reservation was withdrawn")
    error = asking.exception()
    if error is None:
        return asking.result()
    if isinstance(error, TandemError):
        return error
    logger.error("a reservation ended by a bug", exc_info=error)
    return HandoffError("the reservation failed on this worker; see its log")


def _abandoned(task: PrefillTask) -> pb.Abandoned:
    return pb.Abandoned(request_id=task.request.request_id, attempt=task.attempt)


def _reserve_error(worker_id: str, error: grpc.aio.AioRpcError) -> TandemError:
    details = error.details() or error.code().name
    match error.code():
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return NoRoom(details)
        case grpc.StatusCode.ABORTED:
            return Leaving(details)
        case grpc.StatusCode.INVALID_ARGUMENT:
            return InvalidRequest("request", details)
        case _:
            return HandoffError(f"decode worker {worker_id} gave no reservation: {details}")
