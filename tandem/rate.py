"""How quickly something goes, from what has lately been seen of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Rate"]

# Of earlier observations, at each new one: the newest ten or so decide.
_KEPT = 0.9


@dataclass(slots=True)
class Rate:
    """Amount per second. assumed: until the first observation."""

    assumed: float
    _amount: float = 0.0
    _seconds: float = 0.0

    def note(self, amount: float, seconds: float) -> None:
        """Something that took no time, as far as the clock shows, says nothing."""
        if seconds > 0.0:
            self._amount = _KEPT * self._amount + amount
            self._seconds = _KEPT * self._seconds + seconds

    @property
    def per_s(self) -> float:
        return self._amount / self._seconds if self._amount > 0.0 else self.assumed

    @property
    def seconds(self) -> float:
        """Per unit; 0.0: nothing is known or assumed."""
        return 1 / self.per_s if self.per_s else 0.0
