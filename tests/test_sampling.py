import math

import pytest
import torch

from tandem.request import SamplingParams
from tandem.sampling import Draw, sample, uniform


def test_the_uniform_number_is_a_function_of_seed_and_position_only() -> None:
    assert uniform(7, 3) == uniform(7, 3)
    drawn = [uniform(seed, position) for seed in range(50) for position in range(200)]
    assert all(0 <= u < 1 for u in drawn)
    assert len(set(drawn)) == len(drawn)
    assert abs(sum(drawn) / len(drawn) - 0.5) < 0.01
    buckets = [0] * 20
    for u in drawn:
        buckets[int(u * 20)] += 1
    chi2 = sum((b - 500) ** 2 / 500 for b in buckets)
    assert chi2 < 43.8  # 99.9 % quantile at 19 degrees of freedom


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [5.0, 1.0, 5.0]])
    assert sample(logits, [Draw(SamplingParams(), 1)] * 2) == [1, 0]


def test_a_row_is_drawn_the_same_alone_and_among_strangers() -> None:
    torch.manual_seed(0)
    logits = torch.randn(16, 500)
    draws = [
        Draw(SamplingParams(temperature=0.0 if i % 3 == 0 else 0.5 + i / 10, top_p=1 - i / 40, top_k=i * 7, seed=i), 10 + i)
        for i in range(16)
    ]
    together = sample(logits, draws)
    assert together == [sample(logits[i : i + 1], [draws[i]])[0] for i in range(16)]


@pytest.mark.parametrize("params", [SamplingParams(0.7), SamplingParams(1.5, top_k=5), SamplingParams(1.0, top_p=0.6)])
def test_draws_follow_the_cut_distribution(params: SamplingParams) -> None:
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, 1.5, 0.2])
    expected = _reference_distribution(logits.tolist(), params)
    count = 20_000
    draws = [Draw(SamplingParams(params.temperature, params.top_p, params.top_k, seed=99), p) for p in range(count)]
    tokens = sample(logits.expand(count, -1), draws)
    for token, probability in enumerate(expected):
        seen = tokens.count(token)
        if probability == 0:
            assert seen == 0
        else:
            deviation = math.sqrt(count * probability * (1 - probability)) or 1
            assert abs(seen - count * probability) < 5 * deviation


def test_extremes_stay_finite() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0]])
    assert sample(logits, [Draw(SamplingParams(temperature=1e-6, seed=1), 0)]) == [0]
    assert sample(logits, [Draw(SamplingParams(temperature=1.0, top_p=1e-9, seed=1), 0)]) == [0]
    assert sample(logits, [Draw(SamplingParams(temperature=1.0, top_k=1, seed=1), 0)]) == [0]
    assert sample(logits, [Draw(SamplingParams(temperature=100.0, top_k=99, seed=1), 0)])[0] in (0, 1, 2)


def _reference_distribution(logits: list[float], params: SamplingParams) -> list[float]:
    """The same cut, written plainly: sort, top_k, renormalise, smallest set that reaches top_p, renormalise."""
    weights = {i: math.exp(v / params.temperature) for i, v in enumerate(logits)}
    order = sorted(weights, key=lambda i: -weights[i])[: params.top_k or None]
    total = sum(weights[i] for i in order)
    kept: list[int] = []
    reached = 0.0
    for i in order:
        if kept and reached >= params.top_p:
            break
        kept.append(i)
        reached += weights[i] / total
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(logits))]
