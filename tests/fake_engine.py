"""An engine without a model, for tests of the step loops: it records what it is asked to compute."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import torch

from tandem.cache.pool import IndexPool
from tandem.cache.spec import CacheSpecs, ConvTailSpec, PagedKvSpec, RecurrentSpec
from tandem.model.batch import SequenceChunk

VOCAB = 100
SPECS = CacheSpecs(
    layers=(
        (ConvTailSpec(2, 2, 2, 4, "float32"), RecurrentSpec(1, 2, 2)),
        (PagedKvSpec(1, 2, 4, "float32"),),
    )
)


class FakeEngine:
    """The next token is the newest token + 1; `fail_next` makes one forward raise. spoilt_rows: of logits, are no numbers."""

    def __init__(self, num_blocks: int = 32, num_slots: int = 4, num_checkpoints: int = 0) -> None:
        self.copies: list[tuple[str, int, int]] = []
        self.memory = SimpleNamespace(
            specs=SPECS,
            copy_slot=lambda source, target: self.copies.append(("slot", source, target)),
            copy_block=lambda source, target: self.copies.append(("block", source, target)),
        )
        self.loaded = SimpleNamespace(fingerprint="fake")
        self.checkpoint_slots = range(num_slots, num_slots + num_checkpoints)
        self.blocks = IndexPool(num_blocks, "KV blocks")
        self.slots = IndexPool(num_slots, "state slots")
        self.block_size_tokens = SPECS.block_size_tokens
        self.tile_tokens = 1
        self.steps: list[list[SequenceChunk]] = []
        self.fail_next = False
        self.spoilt_rows: set[int] = set()

    def forward(
        self,
        chunks: Sequence[SequenceChunk],
        on_layer: Callable[[int], None] | None = None,
        give_way: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("scripted failure of a step")
        self.steps.append(list(chunks))
        for layer in range(len(SPECS.layers)):
            if give_way is not None:
                give_way()
            if on_layer is not None:
                on_layer(layer)
        return torch.tensor([[float(token)] for chunk in chunks for token in chunk.tokens])

    def logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(hidden_ND.shape[0], VOCAB)
        for row, token in enumerate(hidden_ND[:, 0].tolist()):
            logits[row, (int(token) + 1) % VOCAB] = math.nan if row in self.spoilt_rows else 1.0
        return logits
