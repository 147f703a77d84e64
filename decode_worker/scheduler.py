"""How many verified sequences join the next step. Pure.

Growth needs no decision here: a lease holds the blocks of the whole answer from the start, so a running sequence never
waits for memory.
"""

from __future__ import annotations

__all__ = ["num_joins"]


def num_joins(num_verified: int, num_running: int, max_batch: int, max_joins_per_step: int) -> int:
    """Bounded per step, so that the cadence of the running sequences holds when many arrive at once."""
    return max(0, min(num_verified, max_joins_per_step, max_batch - num_running))
