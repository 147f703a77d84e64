"""One process that prefills and decodes: the reference that the disaggregated cluster is compared with, token for token.

Continuous batching: a sequence joins as soon as its blocks and slot are free and leaves the moment it ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.cache.budget import PoolSizes, size_pools
from tandem.cache.memory import CacheMemory
from tandem.cache.pool import IndexPool
from tandem.config import CacheConfig
from tandem.grammar import Grammars
from tandem.model.batch import ForwardBatch, SequenceChunk
from tandem.model.load import LoadedModel
from tandem.request import Request
from tandem.sampling import SequenceSampler, sample
from tandem.tokenizer import Tokenizer

__all__ = ["ColocatedEngine"]


@dataclass(slots=True)
class _Sequence:
    """index: of its request in the call. absorbed: positions that the caches hold."""

    index: int
    request: Request
    block_ids: list[int]
    slot: int
    sampler: SequenceSampler
    absorbed: int = 0
    answer: list[int] = field(default_factory=list)

    def chunk(self, most_tokens: int) -> SequenceChunk:
        """The next tokens to absorb, at most so many."""
        tokens = (*self.request.tokens[self.absorbed :], *self.answer[max(0, self.absorbed - len(self.request.tokens)) :])
        return SequenceChunk(tokens[:most_tokens], self.absorbed, self.block_ids, self.slot)


class ColocatedEngine:
    """loaded: the model. cache: pool sizes; a budget of 0 gives room for `max_batch` full-length sequences of this call.
    chunk_tokens: prompt tokens per prefill step. max_batch: most sequences that run at once."""

    def __init__(self, loaded: LoadedModel, cache: CacheConfig, chunk_tokens: int, max_batch: int) -> None:
        if chunk_tokens < 1 or max_batch < 1:
            raise ValueError("chunk_tokens and max_batch must be at least 1")
        self._loaded = loaded
        self._cache = cache
        self._specs = loaded.model.cache_specs(cache.block_size_tokens)
        self._chunk_tokens = chunk_tokens
        self._max_batch = max_batch
        self._grammars = Grammars(lambda: Tokenizer.load(loaded.folder), lambda: loaded.config.vocab_size)

    def generate(self, requests: Sequence[Request]) -> list[list[int]]:
        """New tokens of each request, in order; tokens that a request brought as `generated` are not repeated.

        Raises:
            CapacityError: the budget cannot hold the longest request.
        """
        run = _Run(
            self._loaded,
            self._specs.block_size_tokens,
            self._memory(requests),
            self._chunk_tokens,
            self._max_batch,
            self._grammars,
        )
        return run.generate(requests)

    def _memory(self, requests: Sequence[Request]) -> CacheMemory:
        specs = self._specs
        longest = max((request.max_total_tokens for request in requests), default=1)
        if self._cache.budget_bytes:
            sizes = size_pools(specs, self._cache.budget_bytes, longest, self._max_batch)
        else:
            blocks = self._max_batch * max(1, specs.blocks_for(longest))
            sizes = PoolSizes(num_blocks=blocks, num_slots=self._max_batch)
        return CacheMemory.allocate(specs, sizes)


class _Run:
    """One call of `generate`: caches, pools, and who waits, prefills and decodes."""

    def __init__(
        self,
        loaded: LoadedModel,
        block_size: int,
        memory: CacheMemory,
        chunk_tokens: int,
        max_batch: int,
        grammars: Grammars,
    ) -> None:
        self._model = loaded.model
        self._block_size = block_size
        self._memory = memory
        self._chunk_tokens = chunk_tokens
        self._max_batch = max_batch
        self._blocks = IndexPool(memory.sizes.num_blocks, "KV blocks")
        self._slots = IndexPool(memory.sizes.num_slots, "state slots")
        self._running: list[_Sequence] = []
        self._grammars = grammars

    def generate(self, requests: Sequence[Request]) -> list[list[int]]:
        answers: list[list[int]] = [[] for _ in requests]
        waiting = deque(enumerate(requests))
        while waiting or self._running:
            while waiting and (joined := self._join(*waiting[0])):
                waiting.popleft()
                self._prefill(joined)
                self._settle([joined], answers)
            if self._running:
                self._step([s.chunk(1) for s in self._running], self._running)
                self._settle(list(self._running), answers)
        assert self._blocks.num_used == self._slots.num_used == 0, "an ended sequence kept its memory"
        return answers

    def _join(self, index: int, request: Request) -> _Sequence | None:
        count = self._memory.specs.blocks_for(request.max_total_tokens)
        if len(self._running) >= self._max_batch or not (self._blocks.can_allocate(count) and self._slots.can_allocate(1)):
            return None
        memory = self._blocks.allocate(count), self._slots.allocate(1)[0]
        sequence = _Sequence(index, request, *memory, SequenceSampler(request, self._grammars.start(request)))
        self._running.append(sequence)
        return sequence

    def _prefill(self, sequence: _Sequence) -> None:
        while not sequence.answer:
            self._step([sequence.chunk(self._chunk_tokens)], [sequence])

    def _step(self, chunks: list[SequenceChunk], sequences: list[_Sequence]) -> None:
        """One forward; sequences whose every token is absorbed then draw the next."""
        batch = ForwardBatch.build(chunks, self._block_size)
        hidden_TD = self._model.forward(batch, self._memory)
        for sequence, chunk in zip(sequences, chunks, strict=True):
            sequence.absorbed += len(chunk.tokens)
        ready = [i for i, s in enumerate(sequences) if s.absorbed == len(s.request.tokens) + len(s.answer)]
        if not ready:
            return
        logits_RV = self._model.logits(hidden_TD[[batch.cu_seqlens[i + 1] - 1 for i in ready]])
        draws = [sequences[i].sampler.draw() for i in ready]
        for i, token in zip(ready, sample(logits_RV, draws), strict=True):
            sequences[i].answer.append(token)
            sequences[i].sampler.append(token)

    def _settle(self, sequences: list[_Sequence], answers: list[list[int]]) -> None:
        for sequence in sequences:
            num_generated = len(sequence.request.generated) + len(sequence.answer)
            if sequence.request.stop.finish_reason(num_generated, sequence.answer[-1]) is not None:
                answers[sequence.index] = sequence.answer
                self._running.remove(sequence)
                self._blocks.free(sequence.block_ids)
                self._slots.free([sequence.slot])
