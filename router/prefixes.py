"""Which prefill workers hold which prefixes, so that a request finds the worker that has computed most of it. Pure.

Workers publish the names of the prefixes at which they keep a state, a bounded number of them. A prompt's names are computed
once; where it stands is then a look-up per block, however many workers there are.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.cache.names import Prefix, child_name, short

__all__ = ["PrefixDirectory", "PrefixEntry"]


@dataclass(frozen=True, slots=True)
class PrefixEntry:
    """A prefix of `num_tokens` whose state a worker keeps. name, parent: shortened; parent: of the full blocks before, when the
    prefix ends inside a block; else None."""

    name: int
    num_tokens: int
    parent: int | None = None


class PrefixDirectory:
    def __init__(self) -> None:
        self._full: dict[int, set[str]] = {}
        # parent → length → name: few lengths for each parent, so few hashes for a prompt that passes it.
        self._partial: dict[int, dict[int, dict[int, set[str]]]] = {}
        self._entries: dict[str, tuple[PrefixEntry, ...]] = {}

    @property
    def is_empty(self) -> bool:
        return not self._entries

    def replace(self, worker_id: str, entries: tuple[PrefixEntry, ...]) -> None:
        """What the worker holds now; nothing, when it has left."""
        for entry in self._entries.pop(worker_id, ()):
            self._remove(worker_id, entry)
        if entries:
            self._entries[worker_id] = entries
        for entry in entries:
            if entry.parent is None:
                self._full.setdefault(entry.name, set()).add(worker_id)
            else:
                lengths = self._partial.setdefault(entry.parent, {})
                lengths.setdefault(entry.num_tokens, {}).setdefault(entry.name, set()).add(worker_id)

    def hits(self, prefix: Prefix) -> dict[str, int]:
        """Per worker the tokens of this prompt that it need not compute; workers without any are absent."""
        hits: dict[str, int] = {}
        for num_blocks in range(len(prefix.names), -1, -1):
            name = prefix.name_of(num_blocks)
            for num_tokens, workers in self._partial_hits(prefix, name, num_blocks):
                for worker_id in workers:
                    hits.setdefault(worker_id, num_tokens)
            if num_blocks and num_blocks * prefix.block_size_tokens < len(prefix.tokens):
                for worker_id in self._full.get(short(name), ()):
                    hits.setdefault(worker_id, num_blocks * prefix.block_size_tokens)
        return hits

    def _partial_hits(self, prefix: Prefix, name: bytes, num_blocks: int) -> list[tuple[int, set[str]]]:
        """Longest first."""
        lengths = self._partial.get(short(name))
        if not lengths:
            return []
        start = num_blocks * prefix.block_size_tokens
        found = []
        for num_tokens in sorted(lengths, reverse=True):
            if start < num_tokens < len(prefix.tokens):
                workers = lengths[num_tokens].get(short(child_name(name, prefix.tokens[start:num_tokens])))
                if workers:
                    found.append((num_tokens, workers))
        return found

    def _remove(self, worker_id: str, entry: PrefixEntry) -> None:
        if entry.parent is None:
            _discard(self._full, entry.name, worker_id)
            return
        lengths = self._partial.get(entry.parent, {})
        names = lengths.get(entry.num_tokens, {})
        _discard(names, entry.name, worker_id)
        if not names:
            lengths.pop(entry.num_tokens, None)
        if not lengths:
            self._partial.pop(entry.parent, None)


def _discard(holders: dict[int, set[str]], name: int, worker_id: str) -> None:
    workers = holders.get(name, set())
    workers.discard(worker_id)
    if not workers:
        holders.pop(name, None)
