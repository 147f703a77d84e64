"""What bringing a sequence back costs on this worker, from what has lately been seen."""

from __future__ import annotations

from dataclasses import dataclass, field

from decode_worker.scheduler import Costs

__all__ = ["Rate", "Rates"]

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


@dataclass(slots=True)
class Rates:
    """copies: bytes, one way. prefill: positions, from reservation to verified hand-off; since whatever runs has come that way,
    the assumption is never what decides."""

    copies: Rate = field(default_factory=lambda: Rate(4e9))
    prefill: Rate = field(default_factory=lambda: Rate(1e3))

    @property
    def costs(self) -> Costs:
        return Costs(self.copies.per_s, self.prefill.per_s)
