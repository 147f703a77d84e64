"""What the router has measured lately, to tell how long a request would have to wait. Pure: the time is an argument.

An estimate errs towards the quick side: it is used to refuse what cannot be in time, and an error there refuses for nothing.
Measurements are forgotten after a while, so that a slow hour does not refuse for ever after.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

__all__ = ["FirstTokens", "HandoffPace", "QueuePace"]

_REMEMBERED = 64
_FORGOTTEN_AFTER_S = 30.0
_FEWEST = 4
_UNKNOWN_GAP_S = 1.0
_SOONEST_RETRY_S = 0.1
_LATEST_RETRY_S = 60.0


@dataclass(slots=True)
class QueuePace:
    """How quickly requests leave a queue in which others wait: the gaps between them. An empty queue says nothing."""

    _gaps: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))  # (when, gap)
    _since_s: float | None = None
    _next_free_s: float = 0.0

    def waiting(self, now: float) -> None:
        """Requests wait, from now on at the latest."""
        if self._since_s is None:
            self._since_s = now

    def empty(self) -> None:
        """Nobody waits any more: what happens until somebody does is no measure."""
        self._since_s = None

    def left(self, now: float) -> None:
        """A request that waited was placed."""
        if self._since_s is not None:
            self._gaps.append((now, now - self._since_s))
            self._since_s = now

    def wait_s(self, num_ahead: int, now: float) -> float:
        """Estimated wait behind so many; 0.0 while too little was measured."""
        gaps = self._recent(now)
        return num_ahead * sum(gaps) / len(gaps) if len(gaps) >= _FEWEST else 0.0

    def retry_after_s(self, now: float) -> float:
        """When a refused client should come again. Each is told a later time than the one before, at the pace at which places
        become free: so they do not all come back at once."""
        gaps = self._recent(now)
        gap_s = sum(gaps) / len(gaps) if gaps else _UNKNOWN_GAP_S
        self._next_free_s = min(max(now, self._next_free_s) + gap_s, now + _LATEST_RETRY_S)
        return max(_SOONEST_RETRY_S, self._next_free_s - now)

    def _recent(self, now: float) -> list[float]:
        return [gap for when, gap in self._gaps if now - when <= _FORGOTTEN_AFTER_S]


@dataclass(slots=True)
class FirstTokens:
    """How long the quickest recent requests took from their placement to their first token."""

    _seen: deque[tuple[float, int, float]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))  # (when, tokens, seconds)

    def note(self, num_tokens: int, seconds: float, now: float) -> None:
        self._seen.append((now, num_tokens, seconds))

    def least_s(self, num_tokens: int, now: float) -> float:
        """No recent request of this length did better; of longer ones their share by length counts. 0.0: not known."""
        recent = [
            seconds * min(1.0, num_tokens / tokens) for when, tokens, seconds in self._seen if now - when <= _FORGOTTEN_AFTER_S
        ]
        return min(recent) if len(recent) >= _FEWEST else 0.0


@dataclass(slots=True)
class HandoffPace:
    """How little of recent hand-offs was exposed."""

    _seen: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))  # (when, seconds)

    def note(self, exposed_s: float, now: float) -> None:
        """exposed_s: 0.0: it could not be told."""
        if exposed_s > 0.0:
            self._seen.append((now, exposed_s))

    def least_s(self, now: float) -> float:
        """0.0: not known."""
        recent = [seconds for when, seconds in self._seen if now - when <= _FORGOTTEN_AFTER_S]
        return min(recent) if len(recent) >= _FEWEST else 0.0
