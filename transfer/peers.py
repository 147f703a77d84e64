"""The decode workers that a sender is connected to. Belongs to the sender's thread; `layout` may be asked from any."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

from tandem.clock import Clock
from tandem.errors import PeerRefused, TransferFailed
from transfer.agent import TransferAgent, XferHandle, XferState
from transfer.layout import CacheLayout

__all__ = ["Peer", "Peers"]

# After a connection was closed on an error: time in which what had left already arrives, as long as the peer's receiver lives.
_CLOSE_GRACE_S = 1.0


@dataclass(slots=True, eq=False)
class Peer:
    """One connection, wanted or standing.

    deadline_s: when connecting has failed. future: who waits for it. agent_name: under which the agent knows it. probe: the
    read that proves the way; None once it has. broken, leaving: why nothing may be begun any more.
    """

    id: str
    metadata: bytes
    layout: CacheLayout
    deadline_s: float
    future: Future[None]
    agent_name: str = ""
    probe: XferHandle | None = None
    broken: str | None = None
    leaving: str | None = None


class Peers:
    def __init__(self, agent: TransferAgent, clock: Clock) -> None:
        self._agent = agent
        self._clock = clock
        self._peers: dict[str, Peer] = {}

    @property
    def connecting(self) -> bool:
        return any(peer.probe is not None for peer in self._peers.values())

    def layout(self, peer_id: str) -> CacheLayout:
        """Raises TransferFailed unless a new hand-off to this peer may begin."""
        peer = self._peers.get(peer_id)
        reason = self.trouble(peer_id) or (peer.leaving if peer else None)
        if peer is None or reason:
            raise TransferFailed(reason or f"decode worker {peer_id} is not connected")
        return peer.layout

    def trouble(self, peer_id: str) -> str | None:
        """Why a hand-off that has begun cannot go on."""
        peer = self._peers.get(peer_id)
        if peer is None or peer.probe is not None:
            return f"decode worker {peer_id} is not connected"
        return peer.broken

    def agent_name(self, peer_id: str) -> str:
        return self._peers[peer_id].agent_name

    def is_other_life(self, peer: Peer) -> bool:
        """Whether we are connected to a former life of this peer."""
        known = self._peers.get(peer.id)
        return known is not None and known.metadata != peer.metadata

    def connect(self, peer: Peer) -> None:
        """Begin; `peer.future` tells the end of it."""
        known = self._peers.get(peer.id)
        if known is not None:
            self._join(known, peer.future)
            return
        try:
            peer.agent_name = self._agent.add_peer(peer.metadata, peer.layout)
            peer.probe = self._agent.probe(peer.agent_name)
        except (PeerRefused, TransferFailed) as error:
            if peer.agent_name:
                self._agent.remove_peer(peer.agent_name)
            peer.future.set_exception(error)
            return
        self._peers[peer.id] = peer

    def step(self) -> None:
        """Look after those that are connecting."""
        for peer in [peer for peer in self._peers.values() if peer.probe is not None]:
            assert peer.probe is not None
            state = self._agent.poll(peer.probe)
            if state is XferState.DONE:
                self._agent.release(peer.probe)
                peer.probe = None
                peer.future.set_result(None)
            elif state is XferState.FAILED or self._clock.now() >= peer.deadline_s:
                why = "failed" if state is XferState.FAILED else "took too long: is its receiver running?"
                self.remove(peer.id)
                peer.future.set_exception(TransferFailed(f"connecting to decode worker {peer.id} {why}"))

    def leave(self, peer_id: str, reason: str) -> None:
        if peer_id in self._peers:
            self._peers[peer_id].leaving = reason

    def mark_broken(self, peer_id: str, reason: str) -> bool:
        """True if that is news."""
        peer = self._peers.get(peer_id)
        if peer is None or peer.broken is not None:
            return False
        peer.broken = reason
        return True

    def to_drop(self) -> list[str]:
        """Those whose connection is to be closed once nothing is in flight on it."""
        return [peer.id for peer in self._peers.values() if peer.broken is not None]

    def to_leave(self) -> list[str]:
        """Those whose connection is to be closed once no hand-off needs it."""
        return [peer.id for peer in self._peers.values() if peer.leaving is not None]

    def drop(self, peer_id: str) -> float:
        """Close a broken connection; returns the time from which its writes count as quiet."""
        self.remove(peer_id)
        return self._clock.now() + _CLOSE_GRACE_S

    def remove(self, peer_id: str) -> None:
        peer = self._peers.pop(peer_id, None)
        if peer is not None:
            self._agent.remove_peer(peer.agent_name)

    def fail_waiting(self, reason: str) -> None:
        for peer in self._peers.values():
            if peer.probe is not None:
                peer.future.set_exception(TransferFailed(reason))

    def _join(self, known: Peer, future: Future[None]) -> None:
        """Somebody else wants a connection that exists or is being made."""
        if known.broken is not None:
            future.set_exception(TransferFailed(f"the old connection to {known.id} is not closed yet: {known.broken}"))
        elif known.probe is None:
            known.leaving = None
            future.set_result(None)
        else:
            known.future.add_done_callback(lambda done: _pass_on(done, future))


def _pass_on(done: Future[None], future: Future[None]) -> None:
    if (error := done.exception()) is not None:
        future.set_exception(error)
    else:
        future.set_result(None)
