"""What a node knows of its own worker, from the controller's membership. Pure.

A node's life::

    JOINING ──Ray node up──▶ STARTING ──worker ready──▶ SERVING
        │                       │  ▲                       │
        │                       │  └──worker lost──────────┤
        └───────────────────────┴──asked to leave──▶ LEAVING ──worker gone──▶ GONE
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["NodePhase", "Seen", "find_own", "phase_text"]


class NodePhase(enum.Enum):
    JOINING = "joining"
    STARTING = "starting"
    SERVING = "serving"
    LEAVING = "leaving"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Seen:
    """A worker as the membership shows it. address: host:port. state: ready or draining."""

    worker_id: str
    role: str
    address: str
    pid: int
    state: str


def find_own(members: Iterable[Seen], role: str, host: str) -> Seen | None:
    """The worker of this node: the one of its role at its address. None: there is none, or none is ready yet."""
    return next((m for m in members if m.role == role and m.address.rpartition(":")[0].strip("[]") == host), None)


def phase_text(phase: NodePhase, role: str, head: str) -> str:
    """For people who ask why a node is not ready."""
    return {
        NodePhase.JOINING: f"joining the Ray cluster at {head}",
        NodePhase.STARTING: f"its {role} worker is not in the membership yet: it loads, waits for the controller, or was lost",
        NodePhase.SERVING: f"its {role} worker serves",
        NodePhase.LEAVING: f"leaving: its {role} worker finishes what runs",
        NodePhase.GONE: f"its {role} worker has ended in order",
    }[phase]
