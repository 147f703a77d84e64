"""From a memory budget in bytes to the sizes of the two pools. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.cache.spec import CacheSpecs
from tandem.errors import CapacityError

__all__ = ["PoolSizes", "num_checkpoints", "size_pools"]


@dataclass(frozen=True, slots=True)
class PoolSizes:
    num_blocks: int
    num_slots: int


def size_pools(specs: CacheSpecs, budget_bytes: int, max_context_tokens: int, max_sequences: int) -> PoolSizes:
    """Divide `budget_bytes` between state slots and KV blocks.

    Slots are bought first, up to `max_sequences`, but never so many that one full-length sequence's KV no longer fits;
    what is left buys blocks, up to what `max_sequences` full-length sequences could use.

    Raises:
        CapacityError: the budget cannot hold the blocks and the slot of one sequence of `max_context_tokens`.
    """
    blocks_per_sequence = max(1, specs.blocks_for(max_context_tokens))
    kv_bytes = blocks_per_sequence * specs.block_bytes
    needed = kv_bytes + specs.slot_bytes
    if budget_bytes < needed:
        raise CapacityError(
            f"one sequence of {max_context_tokens} tokens needs {needed:,} bytes of cache ({kv_bytes:,} KV in "
            f"{blocks_per_sequence} blocks + {specs.slot_bytes:,} state), the budget is {budget_bytes:,}: "
            "raise the memory budget or lower max_context_tokens"
        )
    # Half of what is not needed for the one full sequence may go to further slots: KV is what grows with use.
    spare = budget_bytes - needed
    extra_slots = spare // 2 // specs.slot_bytes if specs.slot_bytes else max_sequences
    num_slots = min(max_sequences, 1 + extra_slots)
    left = budget_bytes - num_slots * specs.slot_bytes
    most = num_slots * blocks_per_sequence
    num_blocks = min(most, left // specs.block_bytes) if specs.block_bytes else most
    return PoolSizes(num_blocks=num_blocks, num_slots=num_slots)


def num_checkpoints(specs: CacheSpecs, checkpoint_bytes: int, num_blocks: int) -> int:
    """Recurrent checkpoints that `checkpoint_bytes` hold; more than there are blocks would be of no use."""
    if checkpoint_bytes <= 0:
        return 0
    return min(checkpoint_bytes // specs.slot_bytes, num_blocks) if specs.slot_bytes else num_blocks
