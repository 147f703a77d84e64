"""The life of one reservation: its states, the steps between them, and a snapshot of it."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from tandem.request import Request

__all__ = [
    "AWAITED_STATES",
    "FINAL_STATES",
    "LIVE_STATES",
    "MOVES",
    "NO_SLOT",
    "Claim",
    "Lease",
    "LeaseState",
    "Transition",
]

NO_SLOT = -1


class LeaseState(enum.Enum):
    """The life of one reservation.

    ::

        reserved ──write_seen──▶ receiving ──verified──▶ verified ──start_running──▶ running
          │  └───────────────verified──────────────────────▲ │                         │ │
          │ abort, expire │                                  │ abort             abort │ │ release
          ▼               ▼                                  ▼                         ▼ ▼
        quarantined ──writer_quiet, writer_dead──▶ aborted | expired               aborted  released
        reserved, receiving ──writer_quiet, writer_dead──▶ aborted
        running ◀──swap_in── swapped ◀──swap_out── running
                             swapped ──abort──▶ aborted
        reserved ──(at once)──▶ computing ──computed──▶ verified
                                computing ──abort──▶ aborted

    Memory is held in the upper row and in quarantine: a writer that was granted it may still be writing, one-sided, unseen.
    It is free in `released`, `aborted` and `expired`, which are final, and in `swapped`: the sequence waits in host memory
    for others to come. A verified lease's writer has finished, so from there on no quarantine is needed.

    In `computing` the prompt is computed here: nobody else writes, no record is awaited, and nothing expires.
    """

    RESERVED = "reserved"
    RECEIVING = "receiving"
    COMPUTING = "computing"
    VERIFIED = "verified"
    RUNNING = "running"
    SWAPPED = "swapped"
    QUARANTINED = "quarantined"
    RELEASED = "released"
    ABORTED = "aborted"
    EXPIRED = "expired"


S = LeaseState
LIVE_STATES = (S.RESERVED, S.RECEIVING, S.COMPUTING, S.VERIFIED, S.RUNNING, S.SWAPPED, S.QUARANTINED)
"""Those that hold memory, or will again."""
FINAL_STATES = (S.RELEASED, S.ABORTED, S.EXPIRED)
AWAITED_STATES = frozenset({S.RESERVED, S.RECEIVING})
"""Those whose record has yet to come."""
MOVES: dict[LeaseState, frozenset[LeaseState]] = {
    S.RESERVED: frozenset({S.RECEIVING, S.COMPUTING, S.VERIFIED, S.QUARANTINED, S.ABORTED, S.EXPIRED}),
    S.RECEIVING: frozenset({S.VERIFIED, S.QUARANTINED, S.ABORTED, S.EXPIRED}),
    S.COMPUTING: frozenset({S.VERIFIED, S.ABORTED}),
    S.VERIFIED: frozenset({S.RUNNING, S.ABORTED}),
    S.RUNNING: frozenset({S.RELEASED, S.ABORTED, S.SWAPPED}),
    S.SWAPPED: frozenset({S.RUNNING, S.ABORTED}),
    S.QUARANTINED: frozenset({S.ABORTED, S.EXPIRED}),
    S.RELEASED: frozenset(),
    S.ABORTED: frozenset(),
    S.EXPIRED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class Transition:
    """When a lease entered a state, and why."""

    at_s: float
    state: LeaseState
    cause: str


@dataclass(frozen=True, slots=True)
class Claim:
    """KV blocks of one request. first: taken when it is reserved, for what prefill absorbs and the first token after it.
    expected: what it is counted with in admission. whole: for every position that it can reach."""

    first: int = 0
    expected: int = 0
    whole: int = 0
    is_batch: bool = False


@dataclass(frozen=True, slots=True)
class Lease:
    """A snapshot of one reservation; the table holds the newest.

    epoch: of the decode worker's life. nonce: random, says that a record belongs to this very grant. block_ids: for the
    prompt first, growth after; none, and slot `NO_SLOT`, while it is swapped. expires_at: on the table's clock; moved on
    by every sign of life of the writer. writer_finished: the writer has said that it sent its record and will write no more.
    num_held: leading blocks that held the prompt's keys and values when it was reserved; others may have them too, and nobody
    writes them.
    """

    id: str
    epoch: int
    nonce: bytes
    request: Request
    attempt: int
    router_id: str
    writer_id: str
    block_ids: tuple[int, ...]
    slot: int
    expires_at: float
    history: tuple[Transition, ...]
    writer_finished: bool = False
    claim: Claim = Claim()
    num_held: int = 0

    @property
    def slots(self) -> tuple[int, ...]:
        """The slot that it holds, if any."""
        return () if self.slot == NO_SLOT else (self.slot,)

    @property
    def state(self) -> LeaseState:
        return self.history[-1].state

    @property
    def key(self) -> tuple[str, int]:
        return self.request.request_id, self.attempt

    @property
    def story(self) -> str:
        """Its whole history in one line, for people."""
        began_s = self.history[0].at_s
        steps = " → ".join(f"{step.state.value} at {step.at_s - began_s:.3f} s ({step.cause})" for step in self.history)
        return f"lease {self.id} of request {self.request.request_id}, attempt {self.attempt}, writer {self.writer_id}: {steps}"
