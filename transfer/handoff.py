"""One hand-off as its writer sees it: the grant it writes under, the handle it pushes with, and the outcome."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from tandem.cache.spec import CacheSpecs
from tandem.errors import HandoffError
from transfer.agent import XferHandle
from transfer.checksum import state_checksum
from transfer.layout import Kind
from transfer.outgoing_state import OPEN_STATES, OUTGOING_MOVES, OutgoingState
from transfer.plan import Coverage, Part, TransferPlan
from transfer.record import HandoffRecord, WriteNotice, clock_id

__all__ = ["Commands", "Finish", "Flight", "Handoff", "HandoffResult", "LeaseGrant", "Outgoing", "Stopwatch", "WriterIdentity"]

_NOTICE_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class WriterIdentity:
    """What the writer says of itself in every record. fingerprint: of its model."""

    writer_id: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    """A decode worker's answer to a reservation. peer_id: the name under which it was connected. num_held: leading blocks that
    hold the prompt's keys and values already, and must not be written."""

    peer_id: str
    lease_id: str
    epoch: int
    nonce: bytes
    block_ids: tuple[int, ...]
    slot: int
    num_held: int = 0


@dataclass(frozen=True, slots=True)
class HandoffResult:
    """All bytes are there and the record is on its way. The seconds are those in which a write of that kind was in flight.
    held_bytes: of keys and values that did not have to travel. began_s: when the first was posted, on the sender's clock."""

    kv_bytes: int
    state_bytes: int
    kv_seconds: float
    state_seconds: float
    held_bytes: int = 0
    began_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Finish:
    """What only the end of prefill knows. on_done: called once from the sender's thread, unless the hand-off is aborted."""

    num_positions: int
    kv_bytes: int
    held_bytes: int
    first_token: int
    compute_done_s: float
    on_done: Callable[[HandoffResult | HandoffError], None]


@dataclass(slots=True)
class Stopwatch:
    """Seconds in which at least one of several overlapping things ran. began_s: when the first did; None: none has."""

    total_s: float = 0.0
    began_s: float | None = None
    _running: int = 0
    _since_s: float = 0.0

    def start(self, now: float) -> None:
        if self._running == 0:
            self._since_s = now
            self.began_s = now if self.began_s is None else self.began_s
        self._running += 1

    def stop(self, now: float) -> None:
        self._running -= 1
        if self._running == 0:
            self.total_s += now - self._since_s


@dataclass(frozen=True, slots=True)
class Flight:
    """A posted write. deadline_s: after that it counts as failed, though its bytes may still be on their way."""

    kind: Kind
    deadline_s: float


@dataclass(slots=True, eq=False)
class Outgoing:
    """The sender thread's side of a hand-off; nobody else touches it, save that `failure` may be read.

    pending: parts to post. in_flight: by handle. digests: of the state layers posted so far. notice_closing, notice_s: what
    the last notice said and when. failure: why it cannot succeed any more; stays when the caller gives it up. quiet_s: no
    report of quiet before.
    """

    grant: LeaseGrant
    plan: TransferPlan
    request_id: str
    attempt: int
    state: OutgoingState = OutgoingState.OPEN
    pending: deque[Part] = field(default_factory=deque)
    in_flight: dict[XferHandle, Flight] = field(default_factory=dict)
    digests: dict[int, int] = field(default_factory=dict)
    watches: dict[Kind, Stopwatch] = field(default_factory=lambda: {"kv": Stopwatch(), "state": Stopwatch()})
    notice_closing: bool = False
    notice_s: float | None = None
    finish: Finish | None = None
    failure: HandoffError | None = None
    on_quiet: list[Callable[[], None]] = field(default_factory=list)
    quiet_s: float = 0.0

    @property
    def is_open(self) -> bool:
        """The record may still be reached."""
        return self.state in OPEN_STATES

    @property
    def is_complete(self) -> bool:
        """Every byte is there; the record may go."""
        return self.state is OutgoingState.FINISHING and not self.pending and not self.in_flight

    def is_near_with(self, parts: Iterable[Part]) -> bool:
        """With these the record is near: nothing is computed any more, or little after the last layer that has a state. Said
        sooner, as with the first of these layers, it would make the receiver look often, and so slow the decode steps beside
        it, for a whole chunk of prefill."""
        last = self.plan.local.last_state_layer
        return self.finish is not None or any(part.kind == "state" and part.state_layer == last for part in parts)

    def move(self, state: OutgoingState) -> None:
        assert state in OUTGOING_MOVES[self.state], f"{self.state.value} → {state.value}"
        self.state = state

    def notice(self, now: float, *, closing: bool) -> bytes | None:
        """What to tell the receiver before the next write: now and then that writes go on, and once that the record is near."""
        fresh = self.notice_s is not None and now - self.notice_s < _NOTICE_INTERVAL_S
        if fresh and (self.notice_closing or not closing):
            return None
        self.notice_closing |= closing
        self.notice_s = now
        return WriteNotice(self.grant.lease_id, self.grant.epoch, self.grant.nonce, self.notice_closing).encode()

    def record(self, identity: WriterIdentity) -> bytes:
        """The hand-off record, when every write is done."""
        assert self.finish is not None
        return HandoffRecord(
            lease_id=self.grant.lease_id,
            epoch=self.grant.epoch,
            nonce=self.grant.nonce,
            request_id=self.request_id,
            attempt=self.attempt,
            writer_id=identity.writer_id,
            fingerprint=identity.fingerprint,
            layout_digest=self.plan.local.digest,
            num_positions=self.finish.num_positions,
            kv_bytes=self.finish.kv_bytes,
            state_bytes=self.plan.state_bytes,
            state_checksum=state_checksum(self.digests),
            first_token=self.finish.first_token,
            compute_done_s=self.finish.compute_done_s,
            clock_id=clock_id(),
        ).encode()

    def result(self) -> HandoffResult:
        assert self.finish is not None
        return HandoffResult(
            kv_bytes=self.finish.kv_bytes,
            state_bytes=self.plan.state_bytes,
            kv_seconds=self.watches["kv"].total_s,
            state_seconds=self.watches["state"].total_s,
            held_bytes=self.finish.held_bytes,
            began_s=min((watch.began_s for watch in self.watches.values() if watch.began_s is not None), default=0.0),
        )

    def take_pending(self, max_bytes: int) -> list[Part]:
        """The next parts of one kind that make one write of at most `max_bytes`, or one larger part."""
        taken = [self.pending.popleft()]
        size = taken[0].num_bytes
        while self.pending and self.pending[0].kind == taken[0].kind and size + self.pending[0].num_bytes <= max_bytes:
            size += self.pending[0].num_bytes
            taken.append(self.pending.popleft())
        return taken


class Commands(Protocol):
    """What a `Handoff` asks of the sender; each call only enqueues."""

    def post(self, outgoing: Outgoing, parts: Collection[Part]) -> None: ...

    def finish(self, outgoing: Outgoing, parts: Collection[Part], finish: Finish) -> None: ...

    def abort(self, outgoing: Outgoing, on_quiet: Callable[[], None]) -> None: ...


class Handoff:
    """The caller's handle. All methods are cheap and for one thread, the one that computes; the writes happen elsewhere.

    From `push_kv` on, the named blocks must not change; from `push_state` on, that layer's state in the slot must not,
    until `on_done` or `on_quiet` was called.
    """

    def __init__(self, outgoing: Outgoing, specs: CacheSpecs, commands: Commands, *, overlap: bool) -> None:
        self.grant = outgoing.grant
        self._outgoing = outgoing
        self._coverage = Coverage(outgoing.plan)
        self._specs = specs
        self._commands = commands
        self._overlap = overlap
        self._closed = False

    @property
    def failure(self) -> HandoffError | None:
        """Set as soon as it is known that this hand-off cannot succeed: going on with the prefill is pointless."""
        return self._outgoing.failure

    def push_kv(self, start_block: int, stop_block: int, layers: Collection[int] | None = None) -> None:
        """Blocks `start_block … stop_block - 1` of the sequence are final in `layers` (None: in all).

        Raises:
            ValueError: out of range, or pushed before.
        """
        self._require_open()
        if self._overlap:
            self._post(self._coverage.kv(layers, start_block, stop_block))

    def push_state(self, layer: int) -> None:
        """The state of one layer is final: its last position is in.

        Raises:
            ValueError: no state in that layer, or pushed before.
        """
        self._require_open()
        if self._overlap:
            self._post((self._coverage.state(layer),))

    def finish(
        self,
        num_positions: int,
        first_token: int,
        compute_done_s: float,
        on_done: Callable[[HandoffResult | HandoffError], None],
    ) -> None:
        """Everything is computed: send what was not pushed, then the record. `compute_done_s`: on the monotonic clock.
        On an error the caller still owes an `abort`, to learn when the memory is quiet.

        Raises:
            ValueError: the blocks do not hold `num_positions` positions.
        """
        self._require_open()
        num_blocks = self._specs.blocks_for(num_positions)
        rest = self._coverage.rest(num_blocks)
        plan = self._outgoing.plan
        self._closed = True
        byte_counts = plan.kv_bytes(num_blocks), plan.held_bytes(num_blocks)
        finish = Finish(num_positions, *byte_counts, first_token, compute_done_s, on_done)
        self._commands.finish(self._outgoing, rest, finish)

    def abort(self, on_quiet: Callable[[], None]) -> None:
        """Give up, whatever stands. Nothing more is posted, and no record is sent if none was. `on_quiet` is called from the
        sender's thread when no write is in flight: only then may the local memory change and the lease be released."""
        self._closed = True
        self._commands.abort(self._outgoing, on_quiet)

    def _post(self, parts: Iterable[Part]) -> None:
        self._commands.post(self._outgoing, tuple(parts))

    def _require_open(self) -> None:
        if self._closed:
            raise ValueError("the hand-off was finished or aborted before")
