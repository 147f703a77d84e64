"""Stop strings in a stream of text: found however the text is cut, and never delivered in part."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopMatcher"]


class StopMatcher:
    """Looks for the stop string that is complete first; of two that end together the longer one counts.

    Text that may be the beginning of a stop string is held back until it is one, or cannot become one. How the text is cut does
    not change the result. Knuth-Morris-Pratt, one state per stop string: a character costs the same however long the answer is.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise ValueError("a stop string is empty")
        self._stops = tuple(stops)
        self._borders = tuple(_borders(stop) for stop in stops)
        self._matched = [0] * len(stops)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Text that may be delivered now. Once `stopped` is set there is no more, and what comes after is ignored."""
        if self.stopped or not self._stops:
            return "" if self.stopped else text
        buffer = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            if length := self._step(character):
                self.stopped = True
                self._held = ""
                return buffer[: end - length]
        keep = len(buffer) - max(self._matched)
        self._held = buffer[keep:]
        return buffer[:keep]

    def flush(self) -> str:
        """What was held back, at an end that is no stop string."""
        held, self._held = self._held, ""
        return held

    def _step(self, character: str) -> int:
        """Advance all states by one character; the length of the longest stop string that it completes, else 0."""
        complete = 0
        for which, (stop, borders) in enumerate(zip(self._stops, self._borders, strict=True)):
            matched = self._matched[which]
            while matched and stop[matched] != character:
                matched = borders[matched - 1]
            if stop[matched] == character:
                matched += 1
            if matched == len(stop):
                complete = max(complete, matched)
                matched = borders[matched - 1]
            self._matched[which] = matched
        return complete


def _borders(pattern: str) -> tuple[int, ...]:
    """For each prefix of `pattern`, the length of its longest proper prefix that is its suffix too."""
    borders = [0] * len(pattern)
    for end in range(1, len(pattern)):
        length = borders[end - 1]
        while length and pattern[length] != pattern[end]:
            length = borders[length - 1]
        borders[end] = length + 1 if pattern[length] == pattern[end] else length
    return tuple(borders)
