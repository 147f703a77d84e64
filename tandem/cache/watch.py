"""What an idle worker does about indices that are missing from its pools: tells of each once, with its history, and counts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

__all__ = ["PoolWatch"]

logger = logging.getLogger(__name__)


class PoolWatch:
    """history: what is known of an index that `check` named, for people. num_missing: how many were ever found missing."""

    def __init__(self, history: Callable[[str], str]) -> None:
        self.num_missing = 0
        self._history = history
        self._known: frozenset[str] = frozenset()

    def look(self, missing: Sequence[str]) -> None:
        """missing: the names of all indices that are not where they should be at this moment."""
        for name in dict.fromkeys(missing):
            if name not in self._known:
                self.num_missing += 1
                logger.error("idle, but the pools do not sum: %s is missing; %s", name, self._history(name))
        self._known = frozenset(missing)
