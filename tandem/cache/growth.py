"""How many blocks an answer is expected to take. Pure.

Most answers end long before the length that their request allows. So with *overcommit* only a part of that length is counted
when a request is admitted: the sum of what all are expected to take fits the pool, the sum of what they may take need not.
"""

from __future__ import annotations

__all__ = ["expected_blocks"]


def expected_blocks(num_now: int, num_whole: int, overcommit: float, *, resumed: bool = False) -> int:
    """Blocks that a sequence is counted with when it is admitted: those it starts with, and 1 / overcommit of its growth.

    num_now: blocks of the positions that prefill absorbs. num_whole: of all positions that it can reach.
    resumed: it lost its memory once already; it is counted in full, so that this happens to a request but once.
    """
    if overcommit <= 1.0 or resumed:
        return num_whole
    return num_now + _ceil((num_whole - num_now) / overcommit)


def _ceil(value: float) -> int:
    return -int(-value // 1)
