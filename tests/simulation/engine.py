"""An engine without a model whose tokens depend on every byte that it keeps, and the answer as it must be.

What a layer keeps is a digest of the sequence so far: in a DeltaNet layer two words that every token rewrites and a tail of
the newest three; in an attention layer two marks for each position. A step reads all of it back from the cache memory, so
memory that is stale, foreign or half written gives another token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

import numpy as np
import torch

from tandem.cache.budget import PoolSizes
from tandem.cache.memory import CacheMemory
from tandem.cache.pool import IndexPool
from tandem.cache.spec import CacheSpecs, ConvTailSpec, PagedKvSpec, RecurrentSpec
from tandem.model.batch import SequenceChunk
from tandem.request import Request
from tandem.sampling import SequenceSampler, sample

__all__ = ["BLOCK", "FINGERPRINT", "MAX_CONTEXT", "SPECS", "VOCAB", "DigestEngine", "reference"]

BLOCK = 4
VOCAB = 64
MAX_CONTEXT = 96
FINGERPRINT = "digest-1"
_STATE = (ConvTailSpec(1, 1, 1, 4, "float32"), RecurrentSpec(1, 2, 2))
SPECS = CacheSpecs(layers=(_STATE, (PagedKvSpec(1, 2, BLOCK, "float32"),), _STATE))
_STATE_LAYERS = (0, 2)
_KV_LAYER = 1

_MASK = (1 << 64) - 1
_PRIME = 0x9E3779B97F4A7C15
_OTHER = 0xD1342543DE82EF95
_ROWS = 4096
_CHANCE = np.random.default_rng(20)
_TABLE = torch.from_numpy(_CHANCE.standard_normal((_ROWS, VOCAB), dtype=np.float32))
_WEIGHTS = _CHANCE.integers(1, 1 << 63, MAX_CONTEXT + BLOCK, dtype=np.uint64) | np.uint64(1)
_WEIGHT_INTS: list[int] = _WEIGHTS.tolist()
_POSITIONS = np.arange(MAX_CONTEXT + BLOCK, dtype=np.uint64)
_GREEDY: list[int] = _TABLE.argmax(dim=-1).tolist()
_NOTHING: Callable[..., None] = lambda *_: None  # noqa: E731


def _next_word(word: int, token: int, layer: int) -> int:
    mixed = ((word ^ (token + 1)) * _PRIME + layer) & _MASK
    return mixed ^ (mixed >> 29)


def _mark(token: int, position: int) -> int:
    return ((token + 1) * _PRIME + position * _OTHER) & _MASK


class DigestEngine:
    """As `tandem.engine.Engine`. fail_next: the next step raises. between: called between two layers, where a real step would
    leave other threads their time."""

    def __init__(self, num_blocks: int, num_slots: int, num_checkpoints: int = 0) -> None:
        all_slots = num_slots + num_checkpoints
        self.memory = CacheMemory.allocate(SPECS, PoolSizes(num_blocks, all_slots))
        self.checkpoint_slots = range(num_slots, all_slots)
        self.blocks = IndexPool(num_blocks, "KV blocks")
        self.slots = IndexPool(num_slots, "state slots")
        self.block_size_tokens = BLOCK
        self.tile_tokens = 1
        self.device = "cpu"
        self.fail_next = False
        self.between: Callable[[], None] = lambda: None
        self.num_prompt_tokens = 0
        self.loaded = SimpleNamespace(
            name="digest",
            fingerprint=FINGERPRINT,
            max_context_tokens=MAX_CONTEXT,
            config=SimpleNamespace(vocab_size=VOCAB),
            folder="",
        )
        self._words = {
            layer: self.memory.recurrent[layer].view(all_slots, 4).numpy().view(np.uint64) for layer in _STATE_LAYERS
        }
        self._tails = {layer: self.memory.conv[layer].numpy().view(np.int32) for layer in _STATE_LAYERS}
        self._marks = self.memory.kv[_KV_LAYER].view(num_blocks, 2, 2 * BLOCK).numpy().view(np.uint64)

    def forward(
        self,
        chunks: Sequence[SequenceChunk],
        on_layer: Callable[[int], None] | None = None,
        give_way: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("scripted failure of a step")
        on_layer, give_way = on_layer or _NOTHING, give_way or _NOTHING
        totals = [0] * len(chunks)
        for layer in range(len(SPECS.layers)):
            give_way()
            absorb = self._absorb_kv if layer == _KV_LAYER else self._absorb_state
            for place, chunk in enumerate(chunks):
                totals[place] = (totals[place] * _OTHER + absorb(layer, chunk)) & _MASK
            on_layer(layer)
            give_way()
            self.between()
        rows: list[list[float]] = []
        for chunk, total in zip(chunks, totals, strict=True):
            rows += [[-1.0]] * (len(chunk.tokens) - 1) + [[float(_row(total))]]
        return torch.tensor(rows)

    def logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        return _TABLE[hidden_ND[:, 0].long()]

    def _absorb_state(self, layer: int, chunk: SequenceChunk) -> int:
        words, tail = self._words[layer][chunk.slot], self._tails[layer][chunk.slot]
        first, second = (0, 0) if chunk.context_tokens == 0 else (int(words[0]), int(words[1]))
        before = [0, 0, 0] if chunk.context_tokens == 0 else tail[0].tolist()
        spoilt = chunk.context_tokens > 0 and not (tail == np.array(before) + np.arange(3)[:, None]).all()
        for token in chunk.tokens:
            first = _next_word(first, token, layer)
            second = _next_word(second ^ first, before[0], layer)
            before = [*before[1:], token]
        words[0], words[1] = first, second
        tail[:] = np.array(before, np.int32) + np.arange(3, dtype=np.int32)[:, None]
        return (first ^ second) + spoilt

    def _absorb_kv(self, layer: int, chunk: SequenceChunk) -> int:
        start, stop = chunk.context_tokens, chunk.context_tokens + len(chunk.tokens)
        for position, token in enumerate(chunk.tokens, start):
            mark = _mark(token, position)
            block, offset = chunk.block_ids[position // BLOCK], position % BLOCK
            self._marks[block, 0, offset] = mark
            self._marks[block, 1, offset] = mark ^ _OTHER
        table = list(chunk.block_ids[: -(-stop // BLOCK)])
        keys, values = self._marks[table].transpose(1, 0, 2).reshape(2, -1)[:, :stop]
        if not np.array_equal(keys, values ^ np.uint64(_OTHER)):
            return 1
        return int((keys * _WEIGHTS[:stop]).sum())


def _row(total: int) -> int:
    return (total ^ (total >> 31)) * _PRIME >> 20 & (_ROWS - 1)


def reference(request: Request) -> Iterator[int]:
    """The tokens of the answer, one after the other, for as long as one asks. A pure function."""
    sampler = SequenceSampler(request)
    words = dict.fromkeys(_STATE_LAYERS, (0, 0))
    tail = [0, 0, 0]
    marks = 0
    position = 0
    tokens = list(request.prompt)
    while True:
        for token in tokens:
            for layer, (first, second) in words.items():
                first = _next_word(first, token, layer)
                words[layer] = first, _next_word(second ^ first, tail[0], layer)
            tail = [*tail[1:], token]
            marks = (marks + _mark(token, position) * _WEIGHT_INTS[position]) & _MASK
            position += 1
        total = 0
        for digest in (words[0][0] ^ words[0][1], marks, words[2][0] ^ words[2][1]):
            total = (total * _OTHER + digest) & _MASK
        row, draw = _row(total), sampler.draw()
        plain = draw.params.temperature == 0 and draw.adjustment is None
        token = _GREEDY[row] if plain else sample(_TABLE[row : row + 1], [draw])[0]
        sampler.append(token)
        yield token
        tokens = [token]
