"""The parity self-test: what the cluster answers must equal what one process computes, token for token.

The cases stand around the edges where a hand-off goes wrong: the convolution's width, KV blocks, the chunks of the delta
rule, prefill chunks. Pure: the two sides are callables.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tandem.request import Request, SamplingParams, StopRules
from tandem.v1 import inference_pb2 as pb

__all__ = ["Mismatch", "compare", "edge_lengths", "make_cases", "make_crowd", "message_of"]

_CONVOLUTION_WIDTH = 4
_DELTA_CHUNK_TOKENS = 64
_SAMPLED = (
    SamplingParams(temperature=0.8, top_p=0.95, top_k=50, seed=1234),
    SamplingParams(temperature=1.3, seed=2**63 + 11),
    SamplingParams(0.9, seed=5, min_p=0.02, presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.2),
)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """index: of the first token that differs; expected, got: from there on."""

    request: Request
    index: int
    expected: tuple[int, ...]
    got: tuple[int, ...]

    def __str__(self) -> str:
        what = f"{len(self.request.prompt)} prompt tokens, temperature {self.request.sampling.temperature:g}"
        values = f"token {self.index} is {_first(self.got)}, expected {_first(self.expected)}"
        return f"{self.request.request_id} ({what}): {values}"


def edge_lengths(block_size_tokens: int, chunk_tokens: int, longest: int) -> list[int]:
    """Prompt lengths at and beside every boundary, up to `longest`."""
    delta = _DELTA_CHUNK_TOKENS
    edges = (_CONVOLUTION_WIDTH, block_size_tokens, delta, 2 * delta, chunk_tokens, 2 * chunk_tokens)
    lengths = {1, 2, 3, 500} | {edge + by for edge in edges for by in (-1, 0, 1)}
    return sorted(n for n in lengths if 1 <= n <= longest)


def make_cases(lengths: Iterable[int], vocab_size: int, max_new_tokens: int, seed: int = 0) -> list[Request]:
    """Every length greedily; every second one sampled as well."""
    cases = []
    for number, length in enumerate(lengths):
        modes = [SamplingParams(), _SAMPLED[number // 2 % len(_SAMPLED)]][: 1 + number % 2]
        for sampling in modes:
            name = f"length-{length}-{'greedy' if sampling.temperature == 0 else 'sampled'}"
            cases.append(_request(name, length, vocab_size, max_new_tokens, sampling, seed))
    return cases


def make_crowd(count: int, longest: int, vocab_size: int, max_new_tokens: int, seed: int = 1) -> list[Request]:
    """`count` requests of random lengths, to be sent at once: they share steps on both workers."""
    rng = random.Random(seed)
    return [
        _request(
            f"crowd-{number}",
            min(longest, int(rng.lognormvariate(4.0, 1.2)) + 1),
            vocab_size,
            rng.randint(1, max_new_tokens),
            SamplingParams() if number % 2 else SamplingParams(temperature=0.9, top_p=0.9, seed=number),
            seed + number,
        )
        for number in range(count)
    ]


def message_of(request: Request) -> pb.GenerateRequest:
    """What a client sends to get the answer to `request`; the model's own end tokens do not end it."""
    sampling, stop, output = request.sampling, request.stop, request.output
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=request.prompt),
        sampling=pb.Sampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=sampling.seed,
            min_p=sampling.min_p,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            logit_bias=dict(sampling.logit_bias),
        ),
        max_new_tokens=stop.max_new_tokens,
        min_new_tokens=stop.min_new_tokens,
        stop_token_ids=sorted(stop.stop_token_ids),
        ignore_eos=True,
        logprobs=output.logprobs,
        prompt_logprobs=output.prompt_logprobs,
    )


def compare(requests: Sequence[Request], expected: Sequence[Sequence[int]], got: Sequence[Sequence[int]]) -> list[Mismatch]:
    """Where the answers differ; a missing or surplus token is a difference."""
    mismatches = []
    for request, want, have in zip(requests, expected, got, strict=True):
        if list(want) != list(have):
            index = next((i for i, (a, b) in enumerate(zip(want, have, strict=False)) if a != b), min(len(want), len(have)))
            mismatches.append(Mismatch(request, index, tuple(want[index:]), tuple(have[index:])))
    return mismatches


def _request(name: str, length: int, vocab_size: int, max_new_tokens: int, sampling: SamplingParams, seed: int) -> Request:
    rng = random.Random(f"{seed}-{length}-{name}")
    prompt = tuple(rng.randrange(vocab_size) for _ in range(length))
    return Request(request_id=name, prompt=prompt, sampling=sampling, stop=StopRules(max_new_tokens))


def _first(tokens: Sequence[int]) -> str:
    return str(tokens[0]) if tokens else "missing"
