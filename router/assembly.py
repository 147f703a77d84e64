"""The tokens of one attempt, in order, whatever order the two workers' messages arrive in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from tandem.request import FinishReason

__all__ = ["TokenAssembler"]

T = TypeVar("T")


class TokenAssembler(Generic[T]):
    """Each token has an index in the answer. Out come consecutive ones, each once; early ones wait until the gap is filled.
    T: a token with whatever is told beside it."""

    def __init__(self, num_delivered: int) -> None:
        """num_delivered: tokens of the answer that earlier attempts delivered."""
        self._next = num_delivered
        self._held: dict[int, T] = {}
        self._end: int | None = None
        self._reason: FinishReason | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Set once every token up to the end has come out."""
        return self._reason if self._next == self._end else None

    def add(self, index: int, tokens: Sequence[T], finish_reason: FinishReason | None = None) -> list[T]:
        """The tokens that come out now. Those known already, and those behind the end, are dropped."""
        if finish_reason is not None and self._end is None:
            self._end = max(index + len(tokens), self._next)
            self._reason = finish_reason
        for place, token in enumerate(tokens, start=index):
            if place >= self._next and (self._end is None or place < self._end):
                self._held.setdefault(place, token)
        out = []
        while self._next in self._held:
            out.append(self._held.pop(self._next))
            self._next += 1
        return out
