"""A loaded model with its cache memory and pools: the part that both kinds of worker share."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from tandem.cache.budget import num_checkpoints, size_pools
from tandem.cache.memory import CacheMemory
from tandem.cache.pool import IndexPool
from tandem.config import WorkerConfig
from tandem.grammar import Grammars
from tandem.memory_limit import available_bytes
from tandem.model.batch import ForwardBatch, SequenceChunk
from tandem.model.load import LoadedModel, load_model
from tandem.tokenizer import Tokenizer

__all__ = ["Engine", "engine_grammars"]


@dataclass(frozen=True)
class Engine:
    """blocks and slots hold who owns which index of `memory`; nothing else may hand them out. The slots of `memory` past
    those in `slots` are for recurrent checkpoints."""

    loaded: LoadedModel
    memory: CacheMemory
    blocks: IndexPool
    slots: IndexPool
    device: str

    @classmethod
    def build(
        cls, config: WorkerConfig, progress: Callable[[int, int], None] | None = None, checkpoint_bytes: int = 0
    ) -> Engine:
        """Load the weights, then size and allocate the pools from what is left, and `checkpoint_bytes` of state slots more.

        Raises:
            CheckpointError: the model cannot be served.
            CapacityError: the memory budget cannot hold one full-length sequence.
        """
        torch.set_num_threads(config.threads or os.cpu_count() or 1)
        loaded = load_model(config.model, progress, config.device)
        specs = loaded.model.cache_specs(config.cache.block_size_tokens)
        budget = config.cache.budget_bytes or int(available_bytes() * config.cache.free_fraction)
        sizes = size_pools(specs, budget, loaded.max_context_tokens, config.cache.max_sequences)
        all_slots = sizes.num_slots + num_checkpoints(specs, checkpoint_bytes, sizes.num_blocks)
        return cls(
            loaded=loaded,
            memory=CacheMemory.allocate(specs, replace(sizes, num_slots=all_slots), config.device),
            blocks=IndexPool(sizes.num_blocks, "KV blocks"),
            slots=IndexPool(sizes.num_slots, "state slots"),
            device=config.device,
        )

    @property
    def checkpoint_slots(self) -> range:
        return range(self.slots.size, self.memory.sizes.num_slots)

    @property
    def block_size_tokens(self) -> int:
        return self.memory.specs.block_size_tokens

    @property
    def tile_tokens(self) -> int:
        """Chunks that end at multiples of it keep a prompt's numbers those of the uncut one."""
        return self.loaded.model.tile_tokens

    def forward(
        self,
        chunks: Sequence[SequenceChunk],
        on_layer: Callable[[int], None] | None = None,
        give_way: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """One step over `chunks`. Returns the hidden states after the final norm, `[T, D]`.

        on_layer(i) is called as soon as layer i's caches stand for all new tokens. give_way() is called several times in
        each layer, and may run a step over other sequences.
        """
        batch = ForwardBatch.build(chunks, self.block_size_tokens, self.device)
        with torch.inference_mode():
            return self.loaded.model.forward(batch, self.memory, on_layer, give_way)

    def logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return self.loaded.model.logits(hidden_ND)


def engine_grammars(engine: Engine) -> Grammars:
    """For answers of this engine's model; its tokenizer is read when the first one asks."""
    return Grammars(lambda: Tokenizer.load(engine.loaded.folder), lambda: engine.loaded.config.vocab_size)
