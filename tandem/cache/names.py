"""Names of prefixes: a chain of hashes over the tokens, so that equal names mean equal tokens from the start. Pure.

The name of the first n blocks is H(name of the first n-1, tokens of block n), seeded with the model's fingerprint. A router and
a worker that know the same tokens compute the same names, so names alone need to travel.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

__all__ = ["NAME_BYTES", "Prefix", "child_name", "child_names", "root_name", "short"]

NAME_BYTES = 16
_TOKEN_BYTES = struct.calcsize("i")


def root_name(fingerprint: str, block_size_tokens: int) -> bytes:
    """The name of nothing: no two models or block sizes share any."""
    return hashlib.blake2b(f"{block_size_tokens} {fingerprint}".encode(), digest_size=NAME_BYTES).digest()


def child_name(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The name of what `parent` names, followed by `tokens`: a whole block, or the first tokens of one."""
    return hashlib.blake2b(parent + _packed(tokens), digest_size=NAME_BYTES).digest()


def child_names(parent: bytes, tokens: Sequence[int], lengths: Iterable[int]) -> Iterator[tuple[int, bytes]]:
    """Each length with `child_name` of so many of `tokens`. lengths: ascending; each token is hashed once."""
    packed, done = _packed(tokens), 0
    hashed = hashlib.blake2b(parent, digest_size=NAME_BYTES)
    for length in lengths:
        end = length * _TOKEN_BYTES
        hashed.update(packed[done:end])
        done = end
        yield length, hashed.digest()


def short(name: bytes) -> int:
    """64 bits of a name, for an index that may be wrong once in a great while but must be small."""
    return int.from_bytes(name[:8], "little")


def _packed(tokens: Sequence[int]) -> bytes:
    return struct.pack(f"{len(tokens)}i", *tokens)  # twice as quick as an array


@dataclass(frozen=True)
class Prefix:
    """The tokens of one prompt with the names of its whole blocks. Not slotted: the names are computed when first asked for."""

    root: bytes
    tokens: tuple[int, ...]
    block_size_tokens: int

    @classmethod
    def of(cls, fingerprint: str, block_size_tokens: int, tokens: Sequence[int]) -> Prefix:
        return cls(root_name(fingerprint, block_size_tokens), tuple(tokens), block_size_tokens)

    @cached_property
    def names(self) -> tuple[bytes, ...]:
        """Entry i names the first i + 1 blocks; a block that is not full has none."""
        names, name = [], self.root
        packed, size = _packed(self.tokens), self.block_size_tokens * _TOKEN_BYTES
        for end in range(size, len(packed) + 1, size):
            name = hashlib.blake2b(name + packed[end - size : end], digest_size=NAME_BYTES).digest()
            names.append(name)
        return tuple(names)

    @cached_property
    def shorts(self) -> tuple[int, ...]:
        """Entry i is the shortened name of the first i blocks."""
        return (short(self.root), *map(short, self.names))

    def block(self, number: int) -> tuple[int, ...]:
        """Tokens of block `number`; fewer than a block's in the last one."""
        start = number * self.block_size_tokens
        return self.tokens[start : start + self.block_size_tokens]

    def name_of(self, num_blocks: int) -> bytes:
        """Name of the first `num_blocks` blocks."""
        return self.names[num_blocks - 1] if num_blocks else self.root
