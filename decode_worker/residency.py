"""Which of the joined sequences have their memory here, and which wait in host memory. Does what `scheduler` decides.

For the thread of the decode loop, between two steps.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Sequence, Set
from dataclasses import dataclass

from decode_worker.rates import Rates
from decode_worker.scheduler import Candidate, Way, choose_victim, may_return
from decode_worker.sequence import RunningSequence
from tandem.cache.memory import SavedSequence
from tandem.clock import Clock
from tandem.engine import Engine
from tandem.errors import NoRoom
from transfer.lease import LeaseTable

__all__ = ["Eviction", "Residency"]

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Away:
    """Waits in host memory. saved: its KV blocks in use, and its state."""

    sequence: RunningSequence
    saved: SavedSequence


@dataclass(frozen=True, slots=True)
class Eviction:
    """This one gave way. Unless it went to host memory, its caller ends it."""

    sequence: RunningSequence
    way: Way


class Residency:
    """host_bytes: most that copies in host memory may take. rates: fed by whoever sees something of them.

    num_evictions: since start, by way.
    """

    def __init__(self, engine: Engine, leases: LeaseTable, clock: Clock, host_bytes: int) -> None:
        self.rates = Rates()
        self.num_evictions: Counter[Way] = Counter(dict.fromkeys(Way, 0))
        self._engine = engine
        self._specs = engine.memory.specs
        self._leases = leases
        self._clock = clock
        self._free_host_bytes = host_bytes
        self._away: deque[_Away] = deque()

    @property
    def num_away(self) -> int:
        return len(self._away)

    def make_room(self, running: Sequence[RunningSequence]) -> tuple[list[RunningSequence], list[Eviction]]:
        """Those that stay each have the block of their next token, taken in the order in which they came; and who gave way."""
        staying, evicted = list(running), []
        for sequence in [sequence for sequence in running if self._lacks_block(sequence)]:
            while sequence in staying and not self._grow(sequence):
                eviction = self._evict(staying)
                staying.remove(eviction.sequence)
                evicted.append(eviction)
        return staying, evicted

    def bring_back(self, num_running: int) -> list[RunningSequence]:
        """The one that has waited longest, if there is room; one at a time, since the copy holds up the others' step."""
        if not self._away:
            return []
        head = self._away[0]
        num_blocks = self._num_blocks_back(head.sequence)
        if not may_return(num_blocks, num_running, self._leases.num_blocks_free(), self._engine.slots.num_free):
            return []
        sequence = head.sequence
        try:
            sequence.lease = self._leases.swap_in(sequence.lease.id, sequence.lease.epoch, num_blocks)
        except NoRoom:  # a reservation came between
            return []
        self._away.popleft()
        self._free_host_bytes += head.saved.num_bytes
        started_s = self._clock.now()
        num_saved = self._specs.blocks_for(sequence.context_tokens)
        self._engine.memory.restore(head.saved, sequence.lease.block_ids[:num_saved], sequence.lease.slot)
        self.rates.copies.note(head.saved.num_bytes, self._clock.now() - started_s)
        return [sequence]

    def forget(self, lease_ids: Set[str]) -> None:
        """Nobody waits for these any more. Their leases are ended by the caller."""
        for away in self._away:
            if away.sequence.lease.id in lease_ids:
                self._free_host_bytes += away.saved.num_bytes
        self._away = deque(away for away in self._away if away.sequence.lease.id not in lease_ids)

    def _lacks_block(self, sequence: RunningSequence) -> bool:
        """Of the token that the next step writes."""
        return self._specs.blocks_for(sequence.context_tokens + 1) > len(sequence.lease.block_ids)

    def _grow(self, sequence: RunningSequence) -> bool:
        """Whether there was a block for it."""
        needed = self._specs.blocks_for(sequence.context_tokens + 1)
        try:
            sequence.lease = self._leases.grow(sequence.lease.id, sequence.lease.epoch, needed)
        except NoRoom:
            return False
        return True

    def _evict(self, running: Sequence[RunningSequence]) -> Eviction:
        candidates = [self._candidate(sequence) for sequence in running]
        chosen = choose_victim(candidates, self.rates.costs, self._free_host_bytes)
        # Only a sequence that was never resumed lacks a block, and such a one can be.
        assert chosen is not None, "a sequence that lacks a block can go through prefill again"
        sequence = running[chosen.index]
        self.num_evictions[chosen.way] += 1
        logger.info("%s gives way at %d positions: %s", sequence.key, sequence.context_tokens, chosen.way.value)
        if chosen.way is Way.HOST:
            self._send_away(sequence)
        return Eviction(sequence, chosen.way)

    def _send_away(self, sequence: RunningSequence) -> None:
        lease = sequence.lease
        started_s = self._clock.now()
        used = lease.block_ids[: self._specs.blocks_for(sequence.context_tokens)]
        saved = self._engine.memory.save(used, lease.slot)
        self.rates.copies.note(saved.num_bytes, self._clock.now() - started_s)
        self._free_host_bytes -= saved.num_bytes
        sequence.lease = self._leases.swap_out(lease.id, lease.epoch, "evicted to host memory")
        self._away.append(_Away(sequence, saved))

    def _candidate(self, sequence: RunningSequence) -> Candidate:
        num_blocks = self._specs.blocks_for(sequence.context_tokens)
        return Candidate(
            num_tokens=sequence.context_tokens,
            num_bytes=num_blocks * self._specs.block_bytes + self._specs.slot_bytes,
            can_resume=not sequence.lease.request.generated,
        )

    def _num_blocks_back(self, sequence: RunningSequence) -> int:
        """One that cannot go through prefill again needs all, so that it never lacks a block."""
        if sequence.lease.request.generated:
            return sequence.lease.claim.whole
        return self._specs.blocks_for(sequence.context_tokens + 1)
