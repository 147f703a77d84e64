"""Everything that can reach the decode step loop from another thread."""

from __future__ import annotations

from dataclasses import dataclass

from decode_worker.sequence import Key, VerifiedSequence
from transfer.lease import Lease

__all__ = ["CancelSequence", "HandOver", "Message", "RouterGone", "Stop"]


@dataclass(frozen=True, slots=True)
class CancelSequence:
    key: Key


@dataclass(frozen=True, slots=True)
class RouterGone:
    """The session of a router ended: nobody waits any more for what it had here at that moment. It may have a new session
    by now, and new leases."""

    leases: tuple[Lease, ...]


@dataclass(frozen=True, slots=True)
class HandOver:
    """This worker is about to end and has waited long enough: what is left goes on elsewhere."""


@dataclass(frozen=True, slots=True)
class Stop:
    pass


Message = VerifiedSequence | CancelSequence | RouterGone | HandOver | Stop
