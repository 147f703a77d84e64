"""Who joins the next step, who gives way when memory runs out, and who comes back. Pure.

Without overcommit a lease holds the blocks of the whole answer from the start, and nobody ever gives way. With it, admission
counts on answers that end early; when too few do, the sequence that is cheapest to bring back is evicted, one at a time, until
every other has the block of its next token. So what runs never waits for memory as a whole: the one that lacks a block is a
candidate itself.

A sequence comes back with its KV and state from host memory, or by going through prefill again, whichever is estimated to take
less time. Neither goes round in circles:

- what waits in host memory comes back before anything new joins, in the order in which it left, and only when each running
  sequence can take one more block besides: so it makes progress before it can be evicted again;
- what goes through prefill again reserves its whole answer, and is not sent that way a second time.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Candidate", "Costs", "Victim", "Way", "choose_victim", "may_return", "num_joins"]


class Way(enum.Enum):
    """How an evicted sequence comes back."""

    HOST = "host"
    PREFILL = "prefill"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A running sequence. num_tokens: positions in its caches. num_bytes: of the KV blocks in use and of its state.
    can_resume: it may go through prefill again."""

    num_tokens: int
    num_bytes: int
    can_resume: bool


@dataclass(frozen=True, slots=True)
class Costs:
    """As measured on this worker. copy_bytes_per_s: between cache and host memory, one way. prefill_tokens_per_s: positions
    that came in per second between reservation and verified hand-off."""

    copy_bytes_per_s: float
    prefill_tokens_per_s: float

    def seconds(self, candidate: Candidate, way: Way) -> float:
        """To evict it in this way and bring it back: both copies, or prefill and hand-off."""
        if way is Way.HOST:
            return 2 * candidate.num_bytes / self.copy_bytes_per_s
        return candidate.num_tokens / self.prefill_tokens_per_s


@dataclass(frozen=True, slots=True)
class Victim:
    """The candidate at `index` gives way."""

    index: int
    way: Way


def choose_victim(candidates: Sequence[Candidate], costs: Costs, free_host_bytes: int) -> Victim | None:
    """The one that is cheapest to bring back; among equals the one that came last. None: there is no way for any of them.

    candidates: in the order in which they came.
    """
    ways = [
        Victim(index, way)
        for index, candidate in enumerate(candidates)
        for way in Way
        if (candidate.can_resume if way is Way.PREFILL else candidate.num_bytes <= free_host_bytes)
    ]
    return min(ways, key=lambda v: (costs.seconds(candidates[v.index], v.way), -v.index), default=None)


def may_return(num_blocks: int, num_running: int, free_blocks: int, free_slots: int) -> bool:
    """Whether the sequence that has waited longest in host memory comes back now.

    num_blocks: that it needs at once. One more for each that runs must be left, lest the next step evicts somebody.
    """
    return free_slots > 0 and num_blocks + num_running <= free_blocks


def num_joins(num_verified: int, num_running: int, num_away: int, max_batch: int, max_joins_per_step: int) -> int:
    """How many verified sequences join the next step. Bounded, so that the cadence of the running ones holds when many arrive
    at once.

    num_away: evicted ones that wait in host memory. They come first, unless nothing runs: then it may be the verified
    ones that hold the memory, and one of them is let in, so that something ends.
    """
    if num_away:
        return 0 if num_running else min(num_verified, 1)
    return max(0, min(num_verified, max_joins_per_step, max_batch - num_running))
