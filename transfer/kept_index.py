"""What a decode worker tells routers of the prompts whose blocks it keeps. Pure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from tandem.cache.names import short
from tandem.cache.prefix import Node, PrefixCache

__all__ = ["KeptIndex", "KeptIndexer"]

_MOST_PUBLISHED = 256


@dataclass(frozen=True, slots=True)
class KeptIndex:
    """names: shortened, of everything up to the last full block of each prompt; num_tokens: up to there. The newest first.
    version: changes with the content; 0 is empty."""

    version: int = 0
    names: tuple[int, ...] = ()
    num_tokens: tuple[int, ...] = ()


@dataclass(slots=True)
class KeptIndexer:
    """The newest prompts, a bounded number. Of those that share their beginning each counts by itself; what they share is not
    named, since whoever begins so is likely to find it everywhere."""

    kept: PrefixCache
    _ends: OrderedDict[bytes, int] = field(default_factory=OrderedDict)
    _told: KeptIndex = field(default_factory=KeptIndex)
    _seen: tuple[int, int] = (0, 0)
    _num_notes: int = 0

    def note(self, end: Node) -> None:
        """A prompt's last full block is kept."""
        self._ends[end.name] = end.num_tokens
        self._ends.move_to_end(end.name)
        self._num_notes += 1
        if len(self._ends) > _MOST_PUBLISHED:
            self._ends.popitem(last=False)

    def index(self) -> KeptIndex:
        """Replaced when something has changed, never changed itself."""
        seen = (self._num_notes, self.kept.num_evicted)
        if seen != self._seen:
            self._seen = seen
            for name in [name for name in self._ends if not self.kept.holds(name)]:
                del self._ends[name]
            newest = list(reversed(self._ends.items()))
            names = tuple(short(name) for name, _ in newest)
            if names != self._told.names:
                self._told = KeptIndex(self._told.version + 1, names, tuple(count for _, count in newest))
        return self._told
