"""Penalties, bias and cuts are what the reference implementation has, whatever stands beside them in the batch."""

import math

import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tandem.adjust import adjust
from tandem.request import Request, SamplingParams, StopRules
from tandem.sampling import Draw, SequenceSampler, sample

VOCAB = 40
PROMPT = (3, 5, 5, 9)
ANSWER = (5, 7, 7, 11)


def request(sampling: SamplingParams, stop: StopRules | None = None, answer: tuple[int, ...] = ANSWER) -> Request:
    return Request("r", PROMPT, sampling, stop or StopRules(50), generated=answer)


def logits(rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(3)) * 2


def adjusted(given: Request, logits_1V: torch.Tensor) -> torch.Tensor:
    draw = SequenceSampler(given).draw()
    assert draw.adjustment is not None
    return adjust(logits_1V, [(0, draw.adjustment)])


def reference(*processors: LogitsProcessor, tokens: tuple[int, ...] = PROMPT + ANSWER) -> torch.Tensor:
    ids, scores = torch.tensor([tokens]), logits()
    for processor in processors:
        scores = processor(ids, scores)
    return scores


@pytest.mark.parametrize("penalty", [0.5, 1.3, 10.0])
def test_repetition_penalty_is_transformers(penalty: float) -> None:
    ours = adjusted(request(SamplingParams(repetition_penalty=penalty)), logits())
    torch.testing.assert_close(ours, reference(RepetitionPenaltyLogitsProcessor(penalty)))


def test_logit_bias_is_transformers() -> None:
    ours = adjusted(request(SamplingParams(logit_bias=((2, -5.5), (30, 7.0)))), logits())
    torch.testing.assert_close(ours, reference(SequenceBiasLogitsProcessor([[[2], -5.5], [[30], 7.0]])))


def test_presence_counts_a_token_of_the_answer_once_and_frequency_each_time() -> None:
    ours = adjusted(request(SamplingParams(presence_penalty=0.5, frequency_penalty=-0.25)), logits())
    expected = logits()
    for token in range(VOCAB):
        count = ANSWER.count(token)
        expected[0, token] -= 0.5 * (count > 0) - 0.25 * count
    torch.testing.assert_close(ours, expected)


def test_no_stop_token_comes_before_the_least_length() -> None:
    stop = StopRules(50, frozenset({4, 8}), min_new_tokens=len(ANSWER) + 1)
    ours = adjusted(request(SamplingParams(), stop), logits())
    theirs = MinNewTokensLengthLogitsProcessor(len(PROMPT), len(ANSWER) + 1, [4, 8])
    torch.testing.assert_close(ours, reference(theirs))
    sampler = SequenceSampler(request(SamplingParams(), stop))
    sampler.append(1)
    assert sampler.draw().adjustment is None


def test_a_row_that_asks_for_nothing_has_no_adjustment() -> None:
    assert SequenceSampler(request(SamplingParams(0.7, 0.9, 3, 1, min_p=0.1))).draw().adjustment is None
    same = logits(2)
    assert adjust(same, []) is same


def test_the_counts_are_a_function_of_the_tokens_however_they_came() -> None:
    params = SamplingParams(0.9, seed=5, presence_penalty=1.0, frequency_penalty=0.3, repetition_penalty=1.2)
    resumed = SequenceSampler(request(params))
    grown = SequenceSampler(request(params, answer=()))
    for token in ANSWER:
        grown.append(token)
    assert grown.draw().position == resumed.draw().position == len(PROMPT) + len(ANSWER)
    pair = [(0, grown.draw().adjustment), (1, resumed.draw().adjustment)]
    rows = adjust(logits().expand(2, -1), pair)  # type: ignore[arg-type]
    assert torch.equal(rows[0], rows[1])


def test_the_given_logits_are_not_changed() -> None:
    given = logits()
    before = given.clone()
    sample(given, [SequenceSampler(request(SamplingParams(repetition_penalty=2.0))).draw()])
    assert torch.equal(given, before)


def test_every_row_of_a_mixed_batch_is_drawn_as_alone() -> None:
    kinds = [
        SamplingParams(),
        SamplingParams(0.8, seed=1),
        SamplingParams(0.8, 0.9, 12, 2, min_p=0.05, presence_penalty=0.7),
        SamplingParams(frequency_penalty=2.0),
        SamplingParams(1.4, seed=3, repetition_penalty=1.7),
        SamplingParams(1.0, seed=4, logit_bias=((1, 3.0), (5, -100.0))),
    ]
    rows = torch.randn(len(kinds), VOCAB, generator=torch.Generator().manual_seed(9))
    draws = [SequenceSampler(request(kind, StopRules(9, frozenset({2}), 3 * (i % 3)))).draw() for i, kind in enumerate(kinds)]
    assert sample(rows, draws) == [sample(rows[i : i + 1], [draw])[0] for i, draw in enumerate(draws)]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(0.7),
        SamplingParams(1.6, top_k=6),
        SamplingParams(1.0, top_p=0.7),
        SamplingParams(1.2, min_p=0.12),
        SamplingParams(0.9, 0.85, 9, min_p=0.05),
        SamplingParams(1.1, min_p=1.0),
        SamplingParams(1.0, 0.95, repetition_penalty=1.8, logit_bias=((0, 1.5),)),
    ],
    ids=lambda params: f"t{params.temperature:g}-p{params.top_p:g}-k{params.top_k}-m{params.min_p:g}",
)
def test_draws_follow_the_distribution_of_transformers(params: SamplingParams) -> None:
    """Chi-square with fixed seeds: the draws of 4,000 seeds at one position."""
    processors: list[LogitsProcessor] = []
    if params.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.logit_bias:
        processors.append(SequenceBiasLogitsProcessor([[[token], bias] for token, bias in params.logit_bias]))
    processors.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        processors.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        processors.append(MinPLogitsWarper(params.min_p))
    expected = torch.softmax(reference(*processors).double(), -1)[0].tolist()

    count = 4_000
    adjustment = SequenceSampler(request(params)).draw().adjustment
    fields = {name: getattr(params, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    draws = [Draw(SamplingParams(**fields, seed=seed), 8, adjustment) for seed in range(count)]
    tokens = sample(logits().expand(count, -1), draws)

    kept = [token for token in range(VOCAB) if expected[token] > 0]
    assert set(tokens) <= set(kept)
    chi2 = sum((tokens.count(t) - count * expected[t]) ** 2 / (count * expected[t]) for t in kept)
    degrees = len(kept) - 1
    assert chi2 <= degrees + 4 * math.sqrt(2 * degrees)
