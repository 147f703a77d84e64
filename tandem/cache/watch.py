"""What an idle worker does about indices that are missing from its pools: tells of each once, with its history, and counts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence

from tandem.clock import Clock

__all__ = ["PoolWatch"]

logger = logging.getLogger(__name__)
# To look costs time by the size of the pools, and a worker may be idle for days.
_EVERY_S = 60.0


class PoolWatch:
    """history: what is known of an index that `check` named, for people. num_missing: how many were ever found missing."""

    def __init__(self, history: Callable[[str], str], clock: Clock) -> None:
        self.num_missing = 0
        self._history = history
        self._clock = clock
        self._known: frozenset[str] = frozenset()
        self._standing: Hashable = None
        self._due_s = 0.0

    def look_if_due(self, standing: Hashable, missing: Callable[[], Sequence[str]]) -> None:
        """standing: something that changes when the pools do. Looks when it has, and every minute."""
        now = self._clock.now()
        if standing != self._standing or now >= self._due_s:
            self._standing, self._due_s = standing, now + _EVERY_S
            self.look(missing())

    def look(self, missing: Sequence[str]) -> None:
        """missing: the names of all indices that are not where they should be at this moment."""
        for name in dict.fromkeys(missing):
            if name not in self._known:
                self.num_missing += 1
                logger.error("idle, but the pools do not sum: %s is missing; %s", name, self._history(name))
        self._known = frozenset(missing)
