"""What the controller writes down, so that its next life finds the wishes, the workers and what happened.

One JSON document. It is written before anything that the next life must not forget: a number before its worker is launched, a
worker's process and description before routers see it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from controller.events import Event, EventKind

__all__ = ["MemoryStore", "SavedState", "StateStore", "WorkerRecord", "from_json", "to_json"]


class StateStore(Protocol):
    """Keeps one text for longer than the controller's process."""

    async def load(self) -> str:
        """Empty: nothing was saved."""
        ...

    async def save(self, text: str) -> None: ...


@dataclass(slots=True)
class MemoryStore:
    """Lives as long as whoever holds it: for tests, and for a controller that is never restarted."""

    text: str = ""

    async def load(self) -> str:
        return self.text

    async def save(self, text: str) -> None:
        self.text = text


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """state: a WorkerState's value. process: node, pid and start ticks, as the launcher tells them; empty: not known yet.
    reason, drain_s: of a worker that drains."""

    worker_id: str
    number: int
    role: str
    state: str
    description: bytes = b""
    process: tuple[str, int, int] | None = None
    reason: str = ""
    drain_s: float | None = None
    retiring: bool = False


@dataclass(frozen=True, slots=True)
class SavedState:
    """life: part of every worker's id. next_number: of the next worker. wishes: by role; None: all that nodes offer.
    port: on which routers find the controller; 0: none yet. cordoned: addresses of hosts that get no workers."""

    life: str
    next_number: int
    wishes: Mapping[str, int | None]
    workers: tuple[WorkerRecord, ...] = ()
    events: tuple[Event, ...] = ()
    port: int = 0
    cordoned: tuple[str, ...] = ()


def to_json(state: SavedState) -> str:
    data = asdict(state)
    for worker in data["workers"]:
        worker["description"] = base64.b64encode(worker["description"]).decode()
    for event in data["events"]:
        event["kind"] = event["kind"].value
    return json.dumps(data)


def from_json(text: str) -> SavedState:
    data: dict[str, Any] = json.loads(text)
    workers = tuple(_record(worker) for worker in data.pop("workers"))
    events = tuple(Event(**{**event, "kind": EventKind(event["kind"])}) for event in data.pop("events"))
    cordoned = tuple(data.pop("cordoned", ()))
    return SavedState(workers=workers, events=events, cordoned=cordoned, **data)


def _record(data: dict[str, Any]) -> WorkerRecord:
    process = data.pop("process")
    description = base64.b64decode(data.pop("description"))
    return WorkerRecord(process=tuple(process) if process else None, description=description, **data)
