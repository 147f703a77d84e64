"""How much was computed for clients that were gone. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from prefill_worker.prompt import Key

__all__ = ["WasteCount"]


class WasteCount:
    """A cancel takes effect between two steps, so the chunk that runs when it comes is wasted, and no other must be.

    total_chunks: of all requests. worst_chunks: the most for one. `gone` may be called from any thread, the rest belongs
    to the step loop.
    """

    def __init__(self) -> None:
        self.total_chunks = 0
        self.worst_chunks = 0
        self._gone: set[Key] = set()
        self._chunks: Counter[Key] = Counter()

    def gone(self, key: Key) -> None:
        """The client's cancel has come; the loop will hear of it."""
        self._gone.add(key)

    def computed(self, keys: Iterable[Key]) -> None:
        """A chunk of each was computed just now."""
        for key in keys:
            if key in self._gone:
                self._chunks[key] += 1
                self.total_chunks += 1
                self.worst_chunks = max(self.worst_chunks, self._chunks[key])

    def dropped(self, key: Key) -> None:
        """The loop has heard of the cancel."""
        self._gone.discard(key)
        self._chunks.pop(key, None)
