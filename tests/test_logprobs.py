"""Logprobs are the model's own distribution, however the token was chosen."""

import torch

from tandem.logprobs import of_prompt, of_tokens


def test_they_equal_log_softmax_and_alternatives_fall() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    expected = torch.log_softmax(logits, -1)
    first, none, last = of_tokens(logits, [4, 5, 6], [3, None, 0])
    assert none is None
    assert first is not None
    assert last is not None
    assert abs(first.logprob - expected[0, 4].item()) < 1e-6
    assert [token for token, _ in first.top] == expected[0].topk(3).indices.tolist()
    assert all(abs(value - expected[0, token].item()) < 1e-6 for token, value in first.top)
    assert last.top == ()


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = torch.randn(5, 64, generator=torch.Generator().manual_seed(2)) * 9
    together = of_tokens(logits, [1, 2, 3, 4, 5], [5, 1, 0, 20, 7])
    assert together == [of_tokens(logits[i : i + 1], [i + 1], [n])[0] for i, n in enumerate([5, 1, 0, 20, 7])]


def test_nothing_is_computed_when_nobody_asks() -> None:
    assert of_tokens(torch.full((2, 4), float("nan")), [0, 0], [None, None]) == [None, None]


def test_more_alternatives_than_tokens_are_all_tokens() -> None:
    [entry] = of_prompt(torch.randn(1, 4), [2], 20)
    assert len(entry.top) == 4
