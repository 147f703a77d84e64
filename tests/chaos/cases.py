"""Requests with the answers that one process gives, where rounding cannot change them.

A resumed sequence computes its state in chunks, where the lost worker had gone token by token; with a cached prefix, in other
chunks. All are right, and differ by rounding in fp32: by up to 6e-5 of a logit with the random checkpoint. Where the two best
candidates for a token are nearer to each other than that, either may follow. That is no fault, and rare (about one token in
100,000), but a run has tens of thousands of tokens. So answers with such a token in them are left out, and every other must
come token for token.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice

import torch

from tandem.cache.budget import PoolSizes
from tandem.cache.memory import CacheMemory
from tandem.colocated import ColocatedEngine
from tandem.config import CacheConfig, ModelSource
from tandem.model.batch import ForwardBatch, SequenceChunk
from tandem.model.load import LoadedModel, load_model
from tandem.model.random_checkpoint import random_checkpoint
from tandem.request import Request, SamplingParams, StopRules
from tandem.sampling import Draw, sample

__all__ = ["Case", "clear_cases", "long_requests", "make_cases", "random_model"]

_NUM_TOKENS = 256
_LONGEST_PROMPT = 600
_BLOCK_TOKENS = 32
_BATCH = 8
_ROUNDING = 1e-4
_TRIALS = 8
_SAMPLED = (
    SamplingParams(temperature=0.8, seed=7),
    SamplingParams(temperature=0.8, top_p=0.95, top_k=50, seed=1234),
    SamplingParams(temperature=1.3, seed=2**63 + 11),
)


@dataclass(frozen=True, slots=True)
class Case:
    request: Request
    expected: tuple[int, ...]


@cache
def random_model() -> LoadedModel:
    return load_model(ModelSource(path=str(random_checkpoint())))


def make_cases(count: int, seed: int) -> list[Case]:
    """So many clear ones, greedy and seeded, with prompts of many lengths and answers of 30 to 300 tokens."""
    return list(islice(clear_cases(_mixed_requests(seed)), count))


def long_requests(num_tokens: int) -> Iterator[Request]:
    """Greedy ones with answers of so many tokens."""
    for number in range(_NUM_TOKENS):
        prompt = tuple((number + i) % _NUM_TOKENS for i in range(40))
        yield Request(f"long-{number}", prompt, SamplingParams(), StopRules(num_tokens))


def clear_cases(requests: Iterable[Request]) -> Iterator[Case]:
    """Those of the requests whose answer no rounding changes, with it."""
    engine = ColocatedEngine(random_model(), CacheConfig(max_sequences=_BATCH), chunk_tokens=512, max_batch=_BATCH)
    rest = iter(requests)
    while batch := list(islice(rest, _BATCH)):
        for request, answer in zip(batch, engine.generate(batch), strict=True):
            if _is_clear(request, answer):
                yield Case(request, tuple(answer))


def _mixed_requests(seed: int) -> Iterator[Request]:
    rng = random.Random(seed)
    number = 0
    while True:
        length = min(_LONGEST_PROMPT, int(rng.lognormvariate(4.5, 1.2)) + 1)
        yield Request(
            request_id=f"case-{number}",
            prompt=tuple(rng.choices(range(_NUM_TOKENS), k=length)),
            sampling=SamplingParams() if number % 2 else _SAMPLED[number // 2 % len(_SAMPLED)],
            stop=StopRules(rng.randint(30, 300)),
        )
        number += 1


def _is_clear(request: Request, answer: Sequence[int]) -> bool:
    """Whether the same tokens are drawn when the logits are changed at random by more than rounding does."""
    logits_NV = _logits(request.prompt, answer)
    draws = [Draw(request.sampling, len(request.prompt) + i) for i in range(len(answer))]
    noise = torch.Generator().manual_seed(1)
    return all(
        sample(logits_NV + _ROUNDING * torch.randn(logits_NV.shape, generator=noise), draws) == list(answer)
        for _ in range(_TRIALS)
    )


def _logits(prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
    """Of every token of the answer, `[N, V]`: one pass over all of it."""
    loaded = random_model()
    specs = loaded.model.cache_specs(_BLOCK_TOKENS)
    tokens = (*prompt, *answer[:-1])
    num_blocks = specs.blocks_for(len(tokens))
    memory = CacheMemory.allocate(specs, PoolSizes(num_blocks=num_blocks, num_slots=1))
    batch = ForwardBatch.build([SequenceChunk(tokens, 0, tuple(range(num_blocks)), 0)], _BLOCK_TOKENS)
    with torch.inference_mode():
        hidden_TD = loaded.model.forward(batch, memory)
        return loaded.model.logits(hidden_TD[len(prompt) - 1 :])
