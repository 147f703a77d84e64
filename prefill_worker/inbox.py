"""Everything that can reach the prefill step loop from another thread."""

from __future__ import annotations

from dataclasses import dataclass

from prefill_worker.prompt import Key, PrefillTask
from tandem.errors import TandemError
from transfer.handoff import HandoffResult, LeaseGrant

__all__ = [
    "AbsorbAnswer",
    "AskTask",
    "CancelTask",
    "Drain",
    "HandOver",
    "HandoffEnded",
    "MemoryQuiet",
    "Message",
    "ReservationEnded",
    "RouterGone",
    "Stop",
]


@dataclass(frozen=True, slots=True)
class CancelTask:
    key: Key


@dataclass(frozen=True, slots=True)
class AbsorbAnswer:
    """task: of a request that has ended, with its whole answer as `generated`; nobody waits for it."""

    task: PrefillTask


@dataclass(frozen=True, slots=True)
class AskTask:
    """A router wants to know whether this task is here. router_id: who asks."""

    key: Key
    router_id: str


@dataclass(frozen=True, slots=True)
class RouterGone:
    """The session of a router ended: nobody waits for its requests any more."""

    router_id: str


@dataclass(frozen=True, slots=True)
class ReservationEnded:
    """The decode worker's answer: a grant, or the reason why there is none."""

    key: Key
    outcome: LeaseGrant | TandemError


@dataclass(frozen=True, slots=True)
class HandoffEnded:
    """The record has been sent, or the hand-off has failed. Local memory may be freed after a success only."""

    key: Key
    outcome: HandoffResult | TandemError


@dataclass(frozen=True, slots=True)
class MemoryQuiet:
    """No write of an aborted or failed hand-off is in flight: both sides may reuse the memory."""

    key: Key


@dataclass(frozen=True, slots=True)
class Drain:
    """This worker is about to end: what waits goes elsewhere, what comes too, what has memory goes on."""


@dataclass(frozen=True, slots=True)
class HandOver:
    """It has waited long enough: what is left goes elsewhere."""


@dataclass(frozen=True, slots=True)
class Stop:
    pass


Message = (
    PrefillTask
    | AbsorbAnswer
    | CancelTask
    | AskTask
    | RouterGone
    | ReservationEnded
    | HandoffEnded
    | MemoryQuiet
    | Drain
    | HandOver
    | Stop
)
