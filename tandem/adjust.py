"""What changes a row's logits before a token is drawn: tokens that came before, the client's bias, tokens that may not come.

All of it is a function of the request and the tokens so far, so it is the same on any worker and after a resumption. Rows that
ask for nothing cost nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tandem.request import Request, SamplingParams

__all__ = ["Adjustment", "TokenHistory", "adjust"]

_NEVER = float("-inf")


class TokenHistory:
    """Which tokens a sequence has, kept up to date at a cost per token that does not grow.

    prompt: distinct ids of the prompt. counts: how often the answer has which id.
    """

    def __init__(self, request: Request) -> None:
        self.prompt = frozenset(request.prompt)
        self.counts = Counter(request.generated)
        self._prompt_ids = list(self.prompt)
        self._answer_only = [token for token in self.counts if token not in self.prompt]

    def append(self, token: int) -> None:
        if token not in self.counts and token not in self.prompt:
            self._answer_only.append(token)
        self.counts[token] += 1

    def seen(self) -> list[int]:
        """Ids that prompt or answer have, each once."""
        return self._prompt_ids + self._answer_only


@dataclass(frozen=True, slots=True)
class Adjustment:
    """Of one row. history: set when `params.has_penalty`. forbidden: ids that may not be drawn. allowed_V: bool `[V]`, the only
    ids that may be drawn; None: all."""

    params: SamplingParams
    history: TokenHistory | None = None
    forbidden: Sequence[int] = ()
    allowed_V: torch.Tensor | None = None


def adjust(logits_BV: torch.Tensor, rows: Sequence[tuple[int, Adjustment]]) -> torch.Tensor:
    """A copy of `logits_BV` (fp32 `[B, V]`) where the given rows are adjusted; `logits_BV` itself when there are none."""
    if not rows:
        return logits_BV
    out_BV = logits_BV.clone()
    _repeat(out_BV, rows)
    _add(out_BV, rows)
    for row, adjustment in rows:
        if adjustment.allowed_V is not None:
            out_BV[row].masked_fill_(~adjustment.allowed_V.to(out_BV.device), _NEVER)
        if adjustment.forbidden:
            out_BV[row, list(adjustment.forbidden)] = _NEVER
    return out_BV


def _repeat(out_BV: torch.Tensor, rows: Sequence[tuple[int, Adjustment]]) -> None:
    """Repetition penalties of all rows in one gather and one scatter."""
    where: list[int] = []
    ids: list[int] = []
    penalties: list[float] = []
    for row, adjustment in rows:
        penalty = adjustment.params.repetition_penalty
        if penalty != 1.0 and adjustment.history is not None:
            seen = adjustment.history.seen()
            where += [row] * len(seen)
            ids += seen
            penalties += [penalty] * len(seen)
    if where:
        at = _index(out_BV, where, ids)
        values = out_BV[at]
        penalty_K = torch.tensor(penalties, dtype=out_BV.dtype, device=out_BV.device)
        out_BV[at] = torch.where(values < 0, values * penalty_K, values / penalty_K)


def _add(out_BV: torch.Tensor, rows: Sequence[tuple[int, Adjustment]]) -> None:
    """Presence and frequency penalties and biases of all rows in one scatter."""
    where: list[int] = []
    ids: list[int] = []
    amounts: list[float] = []
    for row, adjustment in rows:
        params = adjustment.params
        amount = dict(params.logit_bias)
        if adjustment.history is not None and (params.presence_penalty or params.frequency_penalty):
            for token, count in adjustment.history.counts.items():
                amount[token] = amount.get(token, 0.0) - params.presence_penalty - params.frequency_penalty * count
        where += [row] * len(amount)
        ids += amount.keys()
        amounts += amount.values()
    if where:
        out_BV[_index(out_BV, where, ids)] += torch.tensor(amounts, dtype=out_BV.dtype, device=out_BV.device)


def _index(out_BV: torch.Tensor, rows: list[int], ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(rows, device=out_BV.device), torch.tensor(ids, device=out_BV.device)
