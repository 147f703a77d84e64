"""Which workers hold which prefixes, so that a request finds the workers that have most of it. Pure.

Workers publish the names of prefixes, a bounded number of them: prefill workers of those at which they keep a state, decode
workers of those whose keys and values they keep. A prompt's names are computed once; where it stands is then a look-up per
block, however many workers there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tandem.cache.names import Prefix, child_names, short

__all__ = ["PrefixDirectory", "PrefixEntry"]


class PrefixEntry(NamedTuple):  # hashed by the hundred at each report of a worker
    """A prefix of `num_tokens` that a worker keeps. name, parent: shortened; parent: of the full blocks before, when the
    prefix ends inside a block; else None."""

    name: int
    num_tokens: int
    parent: int | None = None


class PrefixDirectory:
    def __init__(self) -> None:
        self._full: dict[int, set[str]] = {}
        # parent → length → name: few lengths for each parent, so few hashes for a prompt that passes it.
        self._partial: dict[int, dict[int, dict[int, set[str]]]] = {}
        self._entries: dict[str, frozenset[PrefixEntry]] = {}

    @property
    def is_empty(self) -> bool:
        return not self._entries

    def replace(self, worker_id: str, entries: tuple[PrefixEntry, ...]) -> None:
        """What the worker holds now; nothing, when it has left. Costs what has changed, and a look at the rest."""
        before, now = self._entries.pop(worker_id, frozenset()), frozenset(entries)
        if now:
            self._entries[worker_id] = now
        for entry in before - now:
            self._remove(worker_id, entry)
        for entry in now - before:
            if entry.parent is None:
                self._full.setdefault(entry.name, set()).add(worker_id)
            else:
                lengths = self._partial.setdefault(entry.parent, {})
                lengths.setdefault(entry.num_tokens, {}).setdefault(entry.name, set()).add(worker_id)

    def hits(self, prefix: Prefix) -> dict[str, int]:
        """Per worker the tokens of this prompt that it has; workers without any are absent."""
        hits: dict[str, int] = {}
        full, partial, size = self._full, self._partial, prefix.block_size_tokens
        known = [num_blocks for num_blocks, name in enumerate(prefix.shorts) if name in full or name in partial]
        for num_blocks in reversed(known):
            name, num_tokens = prefix.shorts[num_blocks], num_blocks * size
            if name in partial:
                for num_inside, workers in self._partial_hits(prefix, num_blocks):
                    for worker_id in workers:
                        hits.setdefault(worker_id, num_inside)
            if 0 < num_tokens < len(prefix.tokens):
                for worker_id in full.get(name, ()):
                    hits.setdefault(worker_id, num_tokens)
            if len(hits) == len(self._entries):
                break  # what is left is shorter
        return hits

    def _partial_hits(self, prefix: Prefix, num_blocks: int) -> Iterator[tuple[int, set[str]]]:
        """What ends inside the block after so many, longest first."""
        lengths = self._partial[prefix.shorts[num_blocks]]
        start, tokens = num_blocks * prefix.block_size_tokens, prefix.block(num_blocks)
        # The last token of the prompt is computed in any case.
        most = min(len(tokens), len(prefix.tokens) - start - 1)
        inside = sorted(length - start for length in lengths if 0 < length - start <= most)
        named = list(child_names(prefix.name_of(num_blocks), tokens, inside))
        for length, name in reversed(named):
            if workers := lengths[start + length].get(short(name)):
                yield start + length, workers

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
