"""The memory of a prefill worker's prompts: what they take, what they find in it, and what stays when they have gone."""

from __future__ import annotations

from prefill_worker.holdings import Holdings
from prefill_worker.prompt import LocalMemory, PrefillTask
from tandem.cache.checkpoints import CheckpointPolicy
from tandem.cache.names import Prefix, short
from tandem.cache.prefix import Hit, PrefixCache
from tandem.clock import MonotonicClock
from tandem.config import PrefillConfig
from tandem.engine import Engine
from tandem.v1 import worker_pb2 as pb

__all__ = ["PromptMemory"]

# One prompt may not push out what all others left.
_SHARE_PER_PROMPT = 4
_MOST_PUBLISHED = 256


class PromptMemory:
    """Owns the pools of the engine. For the thread of the step loop, between steps; numbers may be read from others.

    `take` and `free` are a pair. A block that somebody holds is never written by another: shared ones are full, and of one
    that is not full the next prompt gets a copy.
    """

    def __init__(self, engine: Engine, config: PrefillConfig, holdings: Holdings | None = None) -> None:
        self._engine = engine
        self._holdings = holdings or Holdings(MonotonicClock())
        slots = engine.checkpoint_slots
        self._cache = PrefixCache(engine.blocks, slots, engine.block_size_tokens)
        self._policy = CheckpointPolicy(
            every_tokens=config.checkpoint_every_tokens,
            at_ends=config.checkpoint_ends,
            most_per_prompt=-(-len(slots) // _SHARE_PER_PROMPT),
        )
        # The rows of a tile that is not full are rounded otherwise than those of a full one: where answers are to be the same
        # to the last bit, nobody else may read what stands there.
        self._whole_tokens = 1 if config.checkpoint_ends else engine.tile_tokens
        self._newest: tuple[PrefillTask, Prefix] | None = None
        self.index = pb.PrefixIndex()

    @property
    def keeps_states(self) -> bool:
        return self._cache.is_on

    @property
    def num_blocks_held(self) -> int:
        """Without those that are only kept: they make room at once."""
        return self._engine.blocks.num_used - self._cache.num_unpinned

    def take(self, task: PrefillTask) -> LocalMemory | None:
        """Blocks and a slot, with what earlier prompts left for this one already in place. None: there is no room now."""
        if not self._engine.slots.can_allocate(1):
            return None
        prefix, num_blocks = self._prefix(task), self._engine.memory.specs.blocks_for(task.num_tokens)
        # Logprobs of the prompt need every position's hidden state.
        hit = self._cache.match(prefix) if task.request.output.prompt_logprobs is None else Hit()
        holding = self._cache.take(prefix, hit, num_blocks)
        if holding is None and hit.num_tokens:  # a hit inside a block needs one block more while it is copied
            hit = Hit()
            holding = self._cache.take(prefix, hit, num_blocks)
        if holding is None:
            return None
        self._newest = None
        slot = self._engine.slots.allocate(1)[0]
        # Copied now: the checkpoint itself is not held, and may go at any later call.
        if hit.partial is not None:
            self._engine.memory.copy_block(hit.partial.block_id, holding.block_ids[len(hit.path)])
        if hit.slot is not None:
            self._engine.memory.copy_slot(hit.slot, slot)
        places = self._policy.places(task.num_tokens, hit.num_tokens, hit.num_kv_tokens, self._engine.block_size_tokens)
        memory = LocalMemory(holding, slot, hit.num_tokens, places)
        self._holdings.took(task.key, memory)
        return memory

    def computed(self, memory: LocalMemory, num_tokens: int) -> None:
        """The caches stand for `num_tokens` positions: share what is final, and keep the state if this is a place for it."""
        self._cache.commit(memory.holding, num_tokens // self._whole_tokens * self._whole_tokens)
        if num_tokens in memory.checkpoints and (slot := self._cache.keep(memory.holding, num_tokens)) is not None:
            self._engine.memory.copy_slot(memory.slot, slot)

    def free(self, memory: LocalMemory) -> None:
        """No write reads from it any more."""
        self._holdings.note(memory, "freed")
        self._cache.release(memory.holding)
        self._engine.slots.free([memory.slot])

    def publish(self) -> None:
        """Bring `index` up to date. It is replaced, never changed: others may be reading it."""
        if self.index.version != self._cache.version:
            nodes = self._cache.newest(_MOST_PUBLISHED)
            self.index = pb.PrefixIndex(
                version=self._cache.version,
                names=[short(node.name) for node in nodes],
                num_tokens=[node.num_tokens for node in nodes],
                parents=[short(node.parent_name) if node.is_partial else 0 for node in nodes],
            )

    @property
    def standing(self) -> tuple[int, ...]:
        """Changes when the pools or the cache do."""
        return self._cache.version, self._engine.blocks.num_used, self._engine.slots.num_used

    def mismatches(self) -> list[str]:
        """What does not sum while no prompt holds anything."""
        return self._cache.check(()) + [f"slot {i}" for i in self._engine.slots.check(())]

    def _prefix(self, task: PrefillTask) -> Prefix:
        """A prompt that waits for room is looked at again and again, its names are computed once."""
        if self._newest is None or self._newest[0] is not task:
            fingerprint = self._engine.loaded.fingerprint
            self._newest = (task, Prefix.of(fingerprint, self._engine.block_size_tokens, task.request.tokens))
        return self._newest[1]
