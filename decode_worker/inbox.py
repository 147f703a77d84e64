"""Everything that can reach the decode step loop from another thread."""

from __future__ import annotations

from dataclasses import dataclass

from decode_worker.sequence import Key, VerifiedSequence
from transfer.lease import Lease

__all__ = ["AskSequence", "CancelSequence", "ComputePrompt", "HandOver", "Message", "RouterGone", "Stop"]


@dataclass(frozen=True, slots=True)
class CancelSequence:
    key: Key


@dataclass(frozen=True, slots=True)
class ComputePrompt:
    """A short prompt to be computed here. lease: holds all that it needs."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class AskSequence:
    """A router wants to know whether the prompt that it placed is here. router_id: who asks."""

    key: Key
    router_id: str


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


Message = VerifiedSequence | CancelSequence | ComputePrompt | AskSequence | RouterGone | HandOver | Stop
