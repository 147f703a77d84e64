"""What bringing a sequence back costs on this worker, from what has lately been seen."""

from __future__ import annotations

from dataclasses import dataclass, field

from decode_worker.scheduler import Costs
from tandem.rate import Rate

__all__ = ["Rates"]


@dataclass(slots=True)
class Rates:
    """copies: bytes, one way. prefill: positions, from reservation to verified hand-off; since whatever runs has come that way,
    the assumption is never what decides."""

    copies: Rate = field(default_factory=lambda: Rate(4e9))
    prefill: Rate = field(default_factory=lambda: Rate(1e3))

    @property
    def costs(self) -> Costs:
        return Costs(self.copies.per_s, self.prefill.per_s)
