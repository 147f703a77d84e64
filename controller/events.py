"""What happened to the pools, with reasons: for operators to read, the newest last. Pure."""

from __future__ import annotations

import enum
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

__all__ = ["Event", "EventKind", "EventLog"]

_KEPT = 64


class EventKind(enum.Enum):
    """SCALED: a wish was changed. STARTED, READY: of a worker. REPLACED: one was started in the place of another.
    DRAINING, DRAINED: it takes no more work, and it has ended in order. LOST: it ended otherwise. FAILED: a start did.
    RESUMED: the controller itself came back and found its workers. CORDONED, UNCORDONED: a host gets no workers, or may
    again."""

    SCALED = "scaled"
    STARTED = "started"
    READY = "ready"
    REPLACED = "replaced"
    DRAINING = "draining"
    DRAINED = "drained"
    LOST = "lost"
    FAILED = "failed"
    RESUMED = "resumed"
    CORDONED = "cordoned"
    UNCORDONED = "uncordoned"


@dataclass(frozen=True, slots=True)
class Event:
    """number: grows by one, for as long as the cluster lives. time_s: Unix time. subject: a worker's id, a pool's name or a
    host. text: one sentence, the subject in it."""

    number: int
    time_s: float
    kind: EventKind
    subject: str
    text: str


class EventLog:
    """The newest events; `wall` gives Unix time."""

    def __init__(self, wall: Callable[[], float] = time.time) -> None:
        self._wall = wall
        self._events: deque[Event] = deque(maxlen=_KEPT)

    def note(self, kind: EventKind, subject: str, text: str) -> Event:
        number = self._events[-1].number + 1 if self._events else 1
        event = Event(number, self._wall(), kind, subject, text)
        self._events.append(event)
        return event

    def restore(self, events: Iterable[Event]) -> None:
        """Those of a former life of the controller come before all others."""
        self._events.extendleft(reversed(tuple(events)))

    @property
    def all(self) -> tuple[Event, ...]:
        return tuple(self._events)

    def newest(self, count: int) -> tuple[Event, ...]:
        return self.all[-count:]
