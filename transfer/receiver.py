"""The decode worker's side of the hand-off: takes records, checks every field, and says which sequences may run.

One-sided writes give the receiver nothing to do but make the library progress and read notifications. One thread owns the
agent. It looks often while a record is near, less often while one is awaited, and seldom otherwise.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tandem.cache.memory import CacheMemory
from tandem.clock import Clock
from tandem.config import TransferConfig
from tandem.errors import HandoffRefused, LeaseLost
from transfer.agent import TransferAgent
from transfer.checksum import slot_checksum
from transfer.layout import CacheLayout
from transfer.lease import LeaseTable
from transfer.lease_state import AWAITED_STATES, Lease, LeaseState
from transfer.looper import Looper
from transfer.record import Expectation, HandoffRecord, WriteNotice, clock_id, decode_message, verify

__all__ = ["OnRefused", "OnVerified", "ReaderIdentity", "Receiver"]

_log = logging.getLogger(__name__)
# Nothing is awaited: the library answers keepalives, and leases are looked at for expiry.
_IDLE_TICK_S = 0.5
# Every look takes the processor and Python's lock from the decode steps. Beside steps of 54 ms on one core, looking every 2, 1,
# 0.5 and 0.2 ms made them 6, 13, 21 and 33 % longer; so it is seldom while a record is awaited, and never as often as a writer
# may look that has nothing else to do.
_AWAITING_FACTOR = 20
_NEAR_FACTOR = 5
# Somebody was told how to connect, and needs our progress for it: at most so long.
_CONNECTING_S = 5.0
# A closing notice is believed for so long; then its writer is slow or gone.
_CLOSING_S = 2.0

OnVerified = Callable[[Lease, HandoffRecord, float], None]
OnRefused = Callable[[Lease | None, HandoffRefused], None]


@dataclass(frozen=True, slots=True)
class ReaderIdentity:
    """What every record is held against. fingerprint: of the model served here."""

    fingerprint: str
    vocab_size: int


@dataclass
class Receiver:
    """See the module. memory, layout: this worker's caches, registered with `agent` already.

    on_verified(lease, record, exposed_s): the sequence may run. exposed_s: from the writer's last computation to now; 0.0 if
    the writer's clock is another machine's. on_refused(lease, refusal): a record did not hold, or a lease expired (field
    `expires_at`); None: it belongs to no lease of ours. Both are called from the receiver's thread and must be short.
    `refused`: how often each field was the reason.
    """

    agent: TransferAgent
    memory: CacheMemory
    layout: CacheLayout
    leases: LeaseTable
    identity: ReaderIdentity
    config: TransferConfig
    clock: Clock
    on_verified: OnVerified
    on_refused: OnRefused
    refused: Counter[str] = field(default_factory=Counter)
    alive: bool = True
    _closing: dict[str, float] = field(default_factory=dict)
    _connecting_until_s: float = 0.0
    _looper: Looper = field(init=False)

    def __post_init__(self) -> None:
        self._looper = Looper("receiver", self.step, self._die)

    def start(self) -> None:
        self._looper.start()

    def stop(self) -> None:
        """End the thread. The agent may be closed after."""
        self._looper.stop()
        self.alive = False

    def wake(self) -> None:
        """A reservation was made: look sooner."""
        self._looper.wake()

    def expect_peer(self) -> None:
        """Somebody is about to connect: look often for a while."""
        self._connecting_until_s = self.clock.now() + _CONNECTING_S
        self._looper.wake()

    def step(self) -> float:
        """Take what has come, end what is late; returns the seconds until the next look should be."""
        for sender, message in self.agent.take_notifications():
            self._on_message(sender, message)
        now = self.clock.now()
        for lease in self.leases.expire(now):
            self._refuse(lease, HandoffRefused("expires_at", f"no record within {now - lease.history[0].at_s:.1f} s"))
        self._closing = {lease_id: until for lease_id, until in self._closing.items() if until > now}
        if self._closing:
            return self.config.poll_interval_s * _NEAR_FACTOR
        if self.leases.num_awaited or now < self._connecting_until_s:
            return self.config.poll_interval_s * _AWAITING_FACTOR
        return _IDLE_TICK_S

    def _on_message(self, sender: str, data: bytes) -> None:
        try:
            message = decode_message(data)
            if isinstance(message, WriteNotice):
                self._on_notice(message)
            else:
                self._on_record(message)
        except HandoffRefused as refusal:
            # What cannot be read, or names no lease of ours, is counted and harms nobody.
            _log.warning("a message of %s: %s", sender, refusal)
            self._refuse(None, refusal)

    def _on_notice(self, notice: WriteNotice) -> None:
        lease = self._lease_of(notice)
        if lease.state in AWAITED_STATES:
            self.leases.write_seen(lease.id, lease.epoch)
            if notice.closing:
                self._closing[lease.id] = self.clock.now() + _CLOSING_S

    def _on_record(self, record: HandoffRecord) -> None:
        lease = self._lease_of(record)
        self._closing.pop(lease.id, None)
        if lease.state not in AWAITED_STATES:
            self._on_late_record(lease)
            return
        try:
            verify(record, self._expectation(lease))
            verified = self.leases.verified(lease.id, lease.epoch)
        except HandoffRefused as refusal:
            self._end_refused(lease, record, refusal)
            return
        except LeaseLost as lost:  # aborted while its state was read
            self.leases.writer_quiet(lease.id, lease.epoch, lease.writer_id)
            self._refuse(lease, HandoffRefused("lease_id", str(lost)))
            return
        self.on_verified(verified, record, self._exposed_s(record))

    def _lease_of(self, message: HandoffRecord | WriteNotice) -> Lease:
        """The lease that a message proves to be about: the nonce was told to its writer alone."""
        try:
            lease = self.leases.get(message.lease_id, message.epoch)
        except LeaseLost as lost:
            raise HandoffRefused("epoch" if message.epoch != self.leases.epoch else "lease_id", str(lost)) from lost
        if message.nonce != lease.nonce:
            raise HandoffRefused("nonce", f"not the one granted with lease {lease.id}")
        return lease

    def _on_late_record(self, lease: Lease) -> None:
        """A duplicate, or the record of a lease that ended meanwhile: refused; but it proves that its writer has finished."""
        if lease.state is LeaseState.QUARANTINED:
            lease = self.leases.writer_quiet(lease.id, lease.epoch, lease.writer_id)
        self._refuse(None, HandoffRefused("lease_id", f"lease {lease.id} is {lease.state.value} already"))

    def _end_refused(self, lease: Lease, record: HandoffRecord, refusal: HandoffRefused) -> None:
        """The record is the last that a writer sends, after all its writes are done: so the memory is free at once. Only if
        another worker than the holder has sent it, nothing is known of the holder's writes."""
        ended = self.leases.abort(lease.id, str(refusal))
        if record.writer_id == lease.writer_id:
            ended = self.leases.writer_quiet(lease.id, lease.epoch, lease.writer_id)
        self._refuse(ended, refusal)

    def _refuse(self, lease: Lease | None, refusal: HandoffRefused) -> None:
        self.refused[refusal.field] += 1
        self.on_refused(lease, refusal)

    def _expectation(self, lease: Lease) -> Expectation:
        num_positions = len(lease.request.tokens)
        specs = self.memory.specs
        return Expectation(
            lease_id=lease.id,
            epoch=lease.epoch,
            nonce=lease.nonce,
            request_id=lease.request.request_id,
            attempt=lease.attempt,
            writer_id=lease.writer_id,
            fingerprint=self.identity.fingerprint,
            layout_digest=self.layout.digest,
            num_positions=num_positions,
            kv_bytes=(specs.blocks_for(num_positions) - lease.num_held) * specs.block_bytes,
            state_bytes=specs.slot_bytes,
            vocab_size=self.identity.vocab_size,
            state_checksum=lambda: slot_checksum(self.memory, lease.slot),
        )

    def _exposed_s(self, record: HandoffRecord) -> float:
        if record.clock_id != clock_id():
            return 0.0
        return max(0.0, self.clock.now() - record.compute_done_s)

    def _die(self) -> None:
        self.alive = False
