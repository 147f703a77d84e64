"""The prefill worker's side of the hand-off: posts writes, watches them, and sends the record when all are done.

One thread owns the agent. It is fed by commands, sleeps while nothing is in flight, and looks every `poll_interval_s` while
something is. `step` is that thread's whole work, so tests call it directly.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from functools import partial

import numpy as np

from tandem.cache.memory import CacheMemory
from tandem.clock import Clock
from tandem.config import TransferConfig
from tandem.errors import HandoffError, TransferFailed
from transfer.agent import TransferAgent, XferHandle, XferState
from transfer.checksum import layer_digest
from transfer.handoff import Finish, Flight, Handoff, LeaseGrant, Outgoing, WriterIdentity
from transfer.layout import CacheLayout
from transfer.looper import Looper
from transfer.outgoing_state import OutgoingState
from transfer.peers import Peer, Peers
from transfer.plan import Part, TransferPlan

__all__ = ["Sender"]

_log = logging.getLogger(__name__)
_MAX_POST_BYTES = 16 << 20
# With nothing in flight: often enough to answer keepalives and to see a closed connection, too seldom to cost anything.
_IDLE_TICK_S = 0.5
# A record is handed to the library, which may need a few more looks to get it out of the door.
_LINGER_S = 0.02


class Sender:
    """See the module. `memory`, `layout`: this worker's caches, registered with `agent` already. on_broken(peer_id, reason):
    called from the sender's thread when a connection is given up; it must be short."""

    def __init__(
        self,
        agent: TransferAgent,
        memory: CacheMemory,
        layout: CacheLayout,
        identity: WriterIdentity,
        config: TransferConfig,
        clock: Clock,
        on_broken: Callable[[str, str], None] = lambda peer_id, reason: None,
    ) -> None:
        self._agent = agent
        self._on_broken = on_broken
        self._memory = memory
        self._layout = layout
        self._identity = identity
        self._config = config
        self._clock = clock
        self._peers = Peers(agent, clock)
        self._outgoing: list[Outgoing] = []
        self._commands: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._ended: str | None = None
        self._linger_until_s = 0.0
        self._looper = Looper("sender", self._pace, partial(self._end, "the sender's thread has ended with an error"))

    # ---- for the worker's threads ----

    def start(self) -> None:
        self._looper.start()

    def stop(self) -> None:
        """End the thread; what was not done fails. The agent may be closed after."""
        self._looper.stop()
        self._end("the sender was stopped")

    @property
    def alive(self) -> bool:
        """False once the thread has ended, for whatever reason: the worker should end too."""
        return self._ended is None

    def connect(self, peer_id: str, metadata: bytes, remote: CacheLayout, timeout_s: float = 10.0) -> None:
        """Connect to a decode worker and prove the way by reading a few bytes of it. Connecting again with the same metadata
        is nothing; with other metadata the old connection is dropped first, since its peer is of a former life.

        Raises:
            PeerRefused: the metadata cannot be used. TransferFailed: no connection within `timeout_s`.
        """
        future = self.connect_soon(peer_id, metadata, remote, timeout_s)
        try:
            future.result(timeout_s + 5.0)
        except TimeoutError as error:
            raise TransferFailed(f"the sender did not connect to {peer_id}") from error

    def connect_soon(self, peer_id: str, metadata: bytes, remote: CacheLayout, timeout_s: float = 10.0) -> Future[None]:
        future: Future[None] = Future()
        self._submit(partial(self._connect, Peer(peer_id, metadata, remote, self._clock.now() + timeout_s, future)))
        return future

    def disconnect(self, peer_id: str, *, dead: bool) -> None:
        """Part from a peer. dead: its process is known to be gone, so everything towards it fails and is quiet at once.
        Otherwise hand-offs under way go on, new ones fail, and the connection ends after the last."""
        self._submit(partial(self._disconnect, peer_id, dead))

    def begin(
        self, grant: LeaseGrant, request_id: str, attempt: int, local_block_ids: Sequence[int], local_slot: int
    ) -> Handoff:
        """Start a hand-off of the sequence in our blocks and slot. Nothing is sent yet.

        Raises:
            TransferFailed: the peer is not connected. HandoffRefused: the grant cannot be.
        """
        if self._ended is not None:
            raise TransferFailed(self._ended)
        remote = self._peers.layout(grant.peer_id)
        blocks, slots = (local_block_ids, grant.block_ids), (local_slot, grant.slot)
        plan = TransferPlan.build(self._layout, remote, blocks, slots, grant.num_held)
        outgoing = Outgoing(grant, plan, request_id, attempt)
        self.post(outgoing, ())
        return Handoff(outgoing, self._memory.specs, self, overlap=self._config.overlap)

    def post(self, outgoing: Outgoing, parts: Collection[Part]) -> None:
        self._submit(partial(self._add, outgoing, parts))

    def finish(self, outgoing: Outgoing, parts: Collection[Part], finish: Finish) -> None:
        self._submit(partial(self._finish, outgoing, parts, finish))

    def abort(self, outgoing: Outgoing, on_quiet: Callable[[], None]) -> None:
        self._submit(partial(self._abort, outgoing, on_quiet))

    # ---- the sender's thread ----

    def step(self) -> bool:
        """Do what was asked, look at what is in flight, report what is over. True: look again soon."""
        self._obey()
        self._agent.take_notifications()  # none is expected: this makes the library progress
        self._peers.step()
        while (outgoing := self._next()) is not None:
            self._post_one(outgoing)
            self._obey()
        for outgoing in self._outgoing:
            for handle in tuple(outgoing.in_flight):
                self._look_at(outgoing, handle)
        self._close_connections()
        self._outgoing = [outgoing for outgoing in self._outgoing if not self._settle(outgoing)]
        # What has failed is looked at in idle time until it ends; nobody waits for its bytes.
        busy = any(outgoing.in_flight and outgoing.failure is None for outgoing in self._outgoing)
        return busy or self._peers.connecting or self._clock.now() < self._linger_until_s

    def _pace(self) -> float:
        return self._config.poll_interval_s if self.step() else _IDLE_TICK_S

    def _submit(self, command: Callable[[], None]) -> None:
        with self._lock:
            ended = self._ended is not None
            if not ended:
                self._commands.append(command)
        if ended:
            command()  # there is no thread any more; every command knows how to fail
        self._looper.wake()

    def _obey(self) -> None:
        while self._commands:
            self._commands.popleft()()

    def _connect(self, peer: Peer) -> None:
        if self._ended is not None:
            peer.future.set_exception(TransferFailed(self._ended))
            return
        if self._peers.is_other_life(peer):
            self._disconnect(peer.id, dead=True)
        self._peers.connect(peer)

    def _disconnect(self, peer_id: str, dead: bool) -> None:
        reason = f"decode worker {peer_id} is gone" if dead else f"decode worker {peer_id} is leaving"
        if not dead:
            self._peers.leave(peer_id, reason)
            return
        for outgoing in self._towards(peer_id):
            self._fail(outgoing, TransferFailed(reason))
            outgoing.in_flight.clear()
            outgoing.quiet_s = 0.0
        self._peers.remove(peer_id)

    def _add(self, outgoing: Outgoing, parts: Collection[Part]) -> None:
        if outgoing not in self._outgoing:
            self._outgoing.append(outgoing)
        if (reason := self._ended or self._peers.trouble(outgoing.grant.peer_id)) is not None:
            self._fail(outgoing, TransferFailed(reason))
        if outgoing.is_open:
            outgoing.pending.extend(parts)

    def _finish(self, outgoing: Outgoing, parts: Collection[Part], finish: Finish) -> None:
        self._add(outgoing, parts)
        outgoing.finish = finish
        if outgoing.failure is not None:
            finish.on_done(outgoing.failure)
        else:
            outgoing.move(OutgoingState.FINISHING)

    def _abort(self, outgoing: Outgoing, on_quiet: Callable[[], None]) -> None:
        outgoing.move(OutgoingState.ABORTED)
        outgoing.pending.clear()
        outgoing.on_quiet.append(on_quiet)
        if outgoing not in self._outgoing:
            self._outgoing.append(outgoing)
        if self._ended is not None:
            self._settle(outgoing)

    def _next(self) -> Outgoing | None:
        """Who posts next: hand-offs whose prefill is over before those that still compute, in order of arrival."""
        waiting = [outgoing for outgoing in self._outgoing if outgoing.pending]
        return min(waiting, key=lambda outgoing: outgoing.finish is None, default=None)

    def _post_one(self, outgoing: Outgoing) -> None:
        parts = outgoing.take_pending(_MAX_POST_BYTES)
        peer = self._peers.agent_name(outgoing.grant.peer_id)
        kind, now = parts[0].kind, self._clock.now()
        outgoing.watches[kind].start(now)
        try:
            if (notice := outgoing.notice(now, closing=outgoing.is_near_with(parts))) is not None:
                self._agent.notify(peer, notice)
            local, remote = np.concatenate([p.local for p in parts]), np.concatenate([p.remote for p in parts])
            handle = self._agent.post_write(peer, local, remote)
        except TransferFailed as error:
            self._break(outgoing.grant.peer_id, error)
            return
        outgoing.in_flight[handle] = Flight(kind, now + self._config.timeout_s)
        for part in parts:
            if part.state_layer is not None:
                outgoing.digests[part.state_layer] = layer_digest(self._memory, part.state_layer, outgoing.plan.local_slot)
        self._look_at(outgoing, handle)  # small writes are over before the post returns

    def _look_at(self, outgoing: Outgoing, handle: XferHandle) -> None:
        flight = outgoing.in_flight[handle]
        peer_id = outgoing.grant.peer_id
        state = self._agent.poll(handle)
        if state is XferState.IN_PROGRESS:
            if self._clock.now() >= flight.deadline_s:
                # Not released, not forgotten: its bytes may still land, so it is polled on until it ends.
                self._break(peer_id, TransferFailed(f"a write to {peer_id} took over {self._config.timeout_s} s"))
            return
        del outgoing.in_flight[handle]
        outgoing.watches[flight.kind].stop(self._clock.now())
        self._agent.release(handle)
        if state is XferState.FAILED:
            self._break(peer_id, TransferFailed(f"a write to {peer_id} failed"))

    def _break(self, peer_id: str, error: HandoffError) -> None:
        """A pair that has failed once is dropped: whoever wants it must connect again."""
        if self._peers.mark_broken(peer_id, str(error)):
            _log.warning("connection dropped: %s", error)
            self._on_broken(peer_id, str(error))
        for outgoing in self._towards(peer_id):
            self._fail(outgoing, error)

    def _fail(self, outgoing: Outgoing, error: HandoffError) -> None:
        outgoing.pending.clear()
        if not outgoing.is_open:
            return
        outgoing.move(OutgoingState.FAILED)
        outgoing.failure = error
        if outgoing.finish is not None:
            outgoing.finish.on_done(error)

    def _close_connections(self) -> None:
        for peer_id in self._peers.to_drop():
            if not any(outgoing.in_flight for outgoing in self._towards(peer_id)):
                quiet_s = self._peers.drop(peer_id)
                for outgoing in self._towards(peer_id):
                    outgoing.quiet_s = quiet_s
        for peer_id in self._peers.to_leave():
            if not self._towards(peer_id):
                self._peers.remove(peer_id)

    def _settle(self, outgoing: Outgoing) -> bool:
        """Report what is over. True: nothing remains to be done about it."""
        if outgoing.is_complete:
            self._send_record(outgoing)
        if outgoing.state is OutgoingState.RECORDED:
            return True
        closing = outgoing.grant.peer_id in self._peers.to_drop()
        if outgoing.is_open or outgoing.in_flight or closing or self._clock.now() < outgoing.quiet_s:
            return False
        if outgoing.state is OutgoingState.ABORTED:
            outgoing.move(OutgoingState.QUIET)
        for on_quiet in outgoing.on_quiet:
            on_quiet()
        outgoing.on_quiet.clear()
        return True

    def _send_record(self, outgoing: Outgoing) -> None:
        finish, peer_id = outgoing.finish, outgoing.grant.peer_id
        assert finish is not None
        try:
            self._agent.notify(self._peers.agent_name(peer_id), outgoing.record(self._identity))
        except TransferFailed as error:
            self._break(peer_id, error)
            return
        outgoing.move(OutgoingState.RECORDED)
        self._linger_until_s = self._clock.now() + _LINGER_S
        finish.on_done(outgoing.result())

    def _towards(self, peer_id: str) -> list[Outgoing]:
        return [outgoing for outgoing in self._outgoing if outgoing.grant.peer_id == peer_id]

    def _end(self, reason: str) -> None:
        """After this no thread works here: everything open fails, and what is asked from now on fails too."""
        with self._lock:
            if self._ended is not None:
                return
            self._ended = reason
        self._obey()
        self._peers.fail_waiting(reason)
        for outgoing in self._outgoing:
            self._fail(outgoing, TransferFailed(reason))
