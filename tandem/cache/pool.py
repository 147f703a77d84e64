"""Who owns which KV block and which state slot. Pure bookkeeping: no tensor is touched here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

__all__ = ["IndexPool"]


class IndexPool:
    """A fixed set of indices 0 … size-1, each either free or owned.

    Used twice per worker, independently: for KV blocks and for state slots. `allocate` and `free` are exact
    inverses; an index freed twice, or never allocated, is a bug of the caller and raises `ValueError`.
    Lowest indices first, so that a sequence's blocks tend to be contiguous.
    """

    def __init__(self, size: int, name: str) -> None:
        if size < 1:
            raise ValueError(f"{name}: a pool needs at least one index, got {size}")
        self.name = name
        self.size = size
        self._free = list(range(size - 1, -1, -1))
        self._is_free = bytearray(b"\x01" * size)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.size - len(self._free)

    def can_allocate(self, count: int) -> bool:
        return 0 <= count <= len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` indices. Ask `can_allocate` first: too few is a `ValueError`."""
        if not self.can_allocate(count):
            raise ValueError(f"{self.name}: {count} wanted, {self.num_free} free")
        taken = [self._free.pop() for _ in range(count)]
        for index in taken:
            self._is_free[index] = 0
        return taken

    def free(self, indices: Iterable[int]) -> None:
        """Give indices back. All or none: a wrong index leaves the pool as it was."""
        returned: Sequence[int] = tuple(indices)
        if len(set(returned)) != len(returned):
            raise ValueError(f"{self.name}: an index occurs twice in {returned}")
        for index in returned:
            if not 0 <= index < self.size or self._is_free[index]:
                raise ValueError(f"{self.name}: index {index} is not allocated")
        for index in reversed(returned):
            self._is_free[index] = 1
            self._free.append(index)

    def check(self, owned: Iterable[int]) -> list[int]:
        """Indices that are neither free nor in `owned`, or both: empty when the pool sums to its size."""
        held = bytearray(self.size)
        wrong = []
        for index in owned:
            if held[index] or self._is_free[index]:
                wrong.append(index)
            held[index] = 1
        known = np.frombuffer(held, np.uint8) | np.frombuffer(self._is_free, np.uint8)
        wrong.extend(np.flatnonzero(known == 0).tolist())
        return wrong
