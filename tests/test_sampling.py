import math
from collections.abc import Callable

import pytest
import torch

from tandem.adjust import Adjustment
from tandem.errors import HandoffError, InvalidRequest
from tandem.request import SamplingParams
from tandem.sampling import Draw, sample, sample_each, uniforms


def test_random_numbers_are_a_function_of_seed_position_and_id_only() -> None:
    draws = [(seed, position) for seed in (0, 1, 7, 2**64 - 1) for position in range(25)]
    drawn = uniforms(draws, 100)
    assert torch.equal(drawn, uniforms(draws, 100))
    assert torch.equal(drawn[3:5, :40], uniforms(draws[3:5], 40))
    assert bool(((drawn > 0) & (drawn < 1)).all())
    assert drawn.unique().numel() == drawn.numel()
    assert abs(drawn.mean().item() - 0.5) < 0.01
    for view in (drawn, drawn.T):  # neither rows nor columns are alike
        buckets = torch.histc(view.reshape(-1), 20, 0, 1)
        assert ((buckets - 500) ** 2 / 500).sum() < 43.8  # 99.9 % quantile at 19 degrees of freedom
        correlation = torch.corrcoef(view)
        assert (correlation - torch.eye(len(view))).abs().max() < 0.6


def test_random_numbers_are_those_of_splitmix64() -> None:
    """Written plainly, with Python's whole numbers."""
    mask = 2**64 - 1

    def mix(z: int) -> int:
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        return z ^ z >> 31

    seed, position, gamma = 2**63 + 11, 12345, 0x9E3779B97F4A7C15
    state = mix(mix(seed + gamma & mask) ^ position * 0xD1342543DE82EF95 & mask)
    expected = [((mix(state + n * gamma & mask) >> 12) + 0.5) / 2**52 for n in range(1, 51)]
    assert uniforms([(seed, position)], 50)[0].tolist() == expected


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


def test_rounding_of_the_logits_changes_next_to_no_draw() -> None:
    """A resumed sequence computes its state in another order of operations: its logits differ by rounding, and few of its
    tokens may."""
    logits = 3 * torch.randn(1000, 5000, generator=torch.Generator().manual_seed(0))
    draws = [Draw(SamplingParams(temperature=0.8, seed=5), position) for position in range(1000)]
    for noise, most in ((1e-4, 1), (1e-2, 20)):
        rounded = logits + noise * torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
        assert sum(a != b for a, b in zip(sample(logits, draws), sample(rounded, draws), strict=True)) <= most


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


def fails(error: Exception) -> Callable[[], Draw]:
    def make() -> Draw:
        raise error

    return make


def test_what_spoils_one_row_ends_that_row_alone(caplog: pytest.LogCaptureFixture) -> None:
    logits = torch.randn(6, 50)
    logits[1, 3] = math.nan
    logits[2, 7] = math.inf
    draw = Draw(SamplingParams(temperature=0.8, seed=3), 9)
    # An adjustment that does not fit the vocabulary fails within the vectorised pass.
    unfit = Draw(SamplingParams(), 1, Adjustment(SamplingParams(), forbidden=(999,)))
    draws = [lambda: draw, lambda: draw, lambda: draw, fails(InvalidRequest("grammar", "no")), fails(KeyError()), lambda: unfit]
    outcomes = sample_each(logits, draws)
    assert outcomes[0] == sample(logits[:1], [draw])[0]
    assert [type(outcome) for outcome in outcomes[1:]] == [
        HandoffError,
        HandoffError,
        InvalidRequest,
        HandoffError,
        HandoffError,
    ]
    assert "not finite" in str(outcomes[1])
    assert "KeyError" in caplog.text
