"""Log-probabilities of tokens as the model has them, before penalties, bias, temperature and cuts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tandem.errors import TandemError
from tandem.request import Drawn, TokenLogprobs

__all__ = ["of_prompt", "of_tokens", "told"]


def of_tokens(logits_BV: torch.Tensor, tokens: Sequence[int], wanted: Sequence[int | None]) -> list[TokenLogprobs | None]:
    """One entry per row of `logits_BV` (fp32 `[B, V]`, unadjusted): of its token and `wanted` alternatives; None: not wanted.

    Rows are computed in fp64, each by itself, so that a row's numbers do not depend on its neighbours.
    """
    rows = [row for row, count in enumerate(wanted) if count is not None]
    found: list[TokenLogprobs | None] = [None] * len(wanted)
    if not rows:
        return found
    told = _rows(logits_BV[rows], [tokens[row] for row in rows], [wanted[row] or 0 for row in rows])
    for row, entry in zip(rows, told, strict=True):
        found[row] = entry
    return found


def told(
    logits_BV: torch.Tensor, outcomes: Sequence[int | TandemError], wanted: Sequence[int | None]
) -> list[Drawn | TandemError]:
    """What `sample_each` gave, with the logprobs that are wanted beside the tokens."""
    asked = [None if isinstance(outcome, TandemError) else count for outcome, count in zip(outcomes, wanted, strict=True)]
    tokens = [0 if isinstance(outcome, TandemError) else outcome for outcome in outcomes]
    entries = of_tokens(logits_BV, tokens, asked)
    return [o if isinstance(o, TandemError) else Drawn(o, entry) for o, entry in zip(outcomes, entries, strict=True)]


def of_prompt(logits_TV: torch.Tensor, next_tokens: Sequence[int], wanted: int) -> list[TokenLogprobs]:
    """Of the tokens that follow each position of `logits_TV` (fp32 `[T, V]`)."""
    return _rows(logits_TV, next_tokens, [wanted] * len(next_tokens))


def _rows(logits_RV: torch.Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    logprobs_RV = torch.log_softmax(logits_RV.double(), dim=-1)
    own = logprobs_RV.gather(1, torch.tensor(tokens, device=logits_RV.device).unsqueeze(1)).squeeze(1).tolist()
    most = min(max(counts), logits_RV.shape[1])
    values, ids = logprobs_RV.topk(most, dim=-1) if most else (logprobs_RV[:, :0], logprobs_RV[:, :0].long())
    return [
        TokenLogprobs(logprob, tuple(zip(row_ids[:count], row_values[:count], strict=True)))
        for logprob, row_ids, row_values, count in zip(own, ids.tolist(), values.tolist(), counts, strict=True)
    ]
