"""One decode worker as a prefill worker holds it: a channel to ask it, and a connection to write to it.

The connection is made again whenever it breaks, and as long as it cannot be made, until `close`: that is, until the controller
says that the decode worker's process is gone. Silence of a peer is no reason to give it up.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

import grpc
import grpc.aio

from tandem.description import check_same_model
from tandem.errors import PeerRefused, TandemError, TransferFailed
from tandem.rpc import create_internal_channel
from tandem.trust import Trust
from tandem.v1 import worker_pb2 as pb
from tandem.v1 import worker_pb2_grpc as pb_grpc
from transfer.layout import CacheLayout
from transfer.sender import Sender

__all__ = ["Ourselves", "PeerLink"]

logger = logging.getLogger(__name__)

_PAIR_CALL_S = 5.0
_CONNECT_S = 5.0
_BACKOFF_FIRST_S = 0.05
_BACKOFF_MAX_S = 5.0


@dataclass(frozen=True)
class Ourselves:
    """What a peer is told of us when we pair, and with what we connect."""

    description: pb.WorkerDescription
    agent_metadata: bytes
    layout: CacheLayout
    sender: Sender
    trust: Trust


class PeerLink:
    """Lives on the event loop, from construction on."""

    def __init__(self, ourselves: Ourselves, peer: pb.WorkerDescription) -> None:
        self.peer_id = peer.worker_id
        self._trouble = "it is not connected yet"
        self._ourselves = ourselves
        self._peer = peer
        self._channel = create_internal_channel(peer.address, ourselves.trust)
        self.stub = pb_grpc.DecodeWorkerStub(self._channel)
        self._wanted = asyncio.Event()  # a connection is to be made
        self._wanted.set()
        self._stands = asyncio.Event()
        self._settled = asyncio.Event()  # stood once, or refused
        self._refusal: PeerRefused | None = None
        self._keeper = asyncio.create_task(self._keep_connected(), name=f"link to {self.peer_id}")

    async def settle(self, timeout_s: float) -> None:
        """Wait for the first connection. After `timeout_s` it goes on being made in the background, for the peer may be
        frozen or slow.

        Raises:
            PeerRefused: the two do not fit together; this link will never stand.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._settled.wait()
        except TimeoutError:
            logger.warning("decode worker %s cannot be reached yet: %s", self.peer_id, self._trouble)
        if self._refusal is not None:
            raise self._refusal

    @property
    def trouble(self) -> str:
        """Why no hand-off to the peer may begin now; empty: it may."""
        return "" if self._stands.is_set() else self._trouble

    async def stand(self, timeout_s: float) -> None:
        """Wait for the connection, which may be being made again.

        Raises:
            TransferFailed: there is none after `timeout_s`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._stands.wait()
        except TimeoutError:
            raise TransferFailed(f"no connection to decode worker {self.peer_id}: {self._trouble}") from None

    def break_off(self, reason: str) -> None:
        """The sender has dropped the connection: make it again."""
        self._trouble = reason
        self._stands.clear()
        self._wanted.set()

    async def close(self) -> None:
        self._keeper.cancel()
        await asyncio.wait([self._keeper])
        await self._channel.close()

    async def _keep_connected(self) -> None:
        while self._refusal is None:
            await self._wanted.wait()
            await self._connect_again_and_again()

    async def _connect_again_and_again(self) -> None:
        pause_s = _BACKOFF_FIRST_S
        while True:
            self._wanted.clear()
            try:
                await self._connect()
            except PeerRefused as refusal:
                self._refusal = refusal
                self._trouble = str(refusal)
                self._settled.set()
                return
            except (TandemError, TimeoutError) as error:
                self._trouble = str(error) or "it does not answer"
                logger.info("no connection to decode worker %s, again in %.2g s: %s", self.peer_id, pause_s, self._trouble)
            else:
                if not self._wanted.is_set():  # else it broke in the meantime
                    logger.info("connected to decode worker %s", self.peer_id)
                    self._stands.set()
                    self._settled.set()
                    return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _BACKOFF_MAX_S)

    async def _connect(self) -> None:
        """Check that both fit, exchange metadata, connect, prepare the descriptor lists.

        Raises:
            PeerRefused: the peer differs in model, layout or secret. TransferFailed, TimeoutError: it cannot be reached.
        """
        ours = self._ourselves
        check_same_model(ours.description.model, self._peer.model)
        request = pb.PairRequest(writer=ours.description, layout_digest=ours.layout.digest, agent_metadata=ours.agent_metadata)
        try:
            reply = await self.stub.Pair(request, timeout=_PAIR_CALL_S)
        except grpc.aio.AioRpcError as error:
            details = f"{self.peer_id} at {self._peer.address}: {error.details() or error.code().name}"
            if error.code() in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAUTHENTICATED):
                raise PeerRefused(details) from error
            raise TransferFailed(details) from error
        layout = CacheLayout.from_wire(reply.regions, ours.layout)
        connecting = ours.sender.connect_soon(self.peer_id, reply.agent_metadata, layout, _CONNECT_S)
        try:
            async with asyncio.timeout(2 * _CONNECT_S):
                # Shielded: the sender's thread sets the outcome, and must find the future open.
                await asyncio.shield(asyncio.wrap_future(connecting))
        except PeerRefused as error:  # by the transfer library, for a connection that is half dead: not for ever
            raise TransferFailed(str(error)) from error
