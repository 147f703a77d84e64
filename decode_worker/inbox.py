"""Everything that can reach the decode step loop from another thread."""

from __future__ import annotations

from dataclasses import dataclass

from decode_worker.sequence import Key, VerifiedSequence

__all__ = ["CancelSequence", "Message", "RouterGone", "Stop"]


@dataclass(frozen=True, slots=True)
class CancelSequence:
    key: Key


@dataclass(frozen=True, slots=True)
class RouterGone:
    """The session of a router ended: nobody waits for its sequences any more."""

    router_id: str


@dataclass(frozen=True, slots=True)
class Stop:
    pass


Message = VerifiedSequence | CancelSequence | RouterGone | Stop
