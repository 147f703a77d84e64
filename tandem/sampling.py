"""Drawing the next token, for a whole batch at once, as a function of (logits, parameters, seed, position).

No generator state exists: the uniform number of a draw is a hash of the request's seed and the index of the token in
the sequence. So the same request gives the same tokens alone or among strangers, on any worker, and after a resumption.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tandem.adjust import Adjustment, TokenHistory, adjust
from tandem.grammar import GrammarState
from tandem.request import Request, SamplingParams

__all__ = ["Draw", "SequenceSampler", "sample", "uniform"]

_MASK64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Draw:
    """One row of a batch: how to sample, and the absolute position of the token to be drawn (prompt included).
    adjustment: of its logits; None: they are taken as they are."""

    params: SamplingParams
    position: int
    adjustment: Adjustment | None = None


class SequenceSampler:
    """What the draws of one sequence depend on beside the logits: a function of its request and the tokens so far.

    `draw` is for the next token, `append` tells which one it became.
    """

    def __init__(self, request: Request, grammar: GrammarState | None = None) -> None:
        """grammar: as `Grammars.start` gave it for this request."""
        self._request = request
        self._grammar = grammar
        self._num_generated = len(request.generated)
        self._history = TokenHistory(request) if request.sampling.has_penalty else None

    def draw(self) -> Draw:
        request = self._request
        position = len(request.prompt) + self._num_generated
        too_early = self._num_generated < request.stop.min_new_tokens
        if self._history is None and self._grammar is None and not too_early and not request.sampling.logit_bias:
            return Draw(request.sampling, position)
        forbidden = sorted(request.stop.stop_token_ids) if too_early else ()
        allowed_V = self._grammar.allowed_V() if self._grammar is not None else None
        return Draw(request.sampling, position, Adjustment(request.sampling, self._history, forbidden, allowed_V))

    def append(self, token: int) -> None:
        self._num_generated += 1
        if self._history is not None:
            self._history.append(token)
        if self._grammar is not None:
            self._grammar.append(token)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from 64 bits of seed and a position: SplitMix64's finaliser over both
    (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014), top 53 bits."""
    z = _mix(((seed & _MASK64) + 0x9E3779B97F4A7C15) & _MASK64)
    z = _mix((z ^ (position * 0xD1342543DE82EF95)) & _MASK64)
    return (z >> 11) * 2.0**-53


def sample(logits_BV: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """Token ids, one per row of `logits_BV` (fp32 `[B, V]`, finite; not changed).

    Logits are adjusted first (see `tandem.adjust`). Greedy rows take the largest, the lowest id among equals. Other rows are
    divided by temperature, cut to top_k, then to top_p over the renormalised rest, then to min_p, and drawn by inverse CDF in
    order of falling probability.
    """
    assert logits_BV.shape[0] == len(draws)
    logits_BV = adjust(logits_BV, [(row, draw.adjustment) for row, draw in enumerate(draws) if draw.adjustment is not None])
    tokens: list[int] = logits_BV.argmax(dim=-1).tolist()
    rows = [i for i, draw in enumerate(draws) if draw.params.temperature > 0]
    if rows:
        drawn = _sample_rows(logits_BV[rows], [draws[i] for i in rows])
        for row, token in zip(rows, drawn, strict=True):
            tokens[row] = token
    return tokens


def _sample_rows(logits_RV: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    def column(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=logits_RV.device).unsqueeze(1)

    temperature_R1 = column([d.params.temperature for d in draws], torch.float64)
    top_p_R1 = column([d.params.top_p for d in draws], torch.float64)
    min_p_R1 = column([d.params.min_p for d in draws], torch.float64)
    vocab = logits_RV.shape[1]
    top_k_R1 = column([min(d.params.top_k or vocab, vocab) for d in draws], torch.int64)
    uniform_R1 = column([uniform(d.params.seed, d.position) for d in draws], torch.float64)

    # fp64 from here: a tiny temperature must not overflow, and the CDF must end at 1 for large vocabularies.
    sorted_RV, ids_RV = logits_RV.double().sort(dim=-1, descending=True, stable=True)
    probs_RV = torch.softmax((sorted_RV - sorted_RV[:, :1]) / temperature_R1, dim=-1)
    rank_V = torch.arange(vocab, device=logits_RV.device).unsqueeze(0)
    probs_RV = probs_RV.masked_fill(rank_V >= top_k_R1, 0.0)
    probs_RV = probs_RV / probs_RV.sum(dim=-1, keepdim=True)
    before_RV = probs_RV.cumsum(dim=-1) - probs_RV
    cut_RV = (before_RV >= top_p_R1) | (probs_RV < min_p_R1 * probs_RV[:, :1])
    probs_RV = probs_RV.masked_fill(cut_RV & (rank_V > 0), 0.0)

    cdf_RV = probs_RV.cumsum(dim=-1)
    index_R1 = torch.searchsorted(cdf_RV, uniform_R1 * cdf_RV[:, -1:], right=True)
    last_kept_R1 = (probs_RV > 0).sum(dim=-1, keepdim=True) - 1
    return ids_RV.gather(1, torch.minimum(index_R1, last_kept_R1)).squeeze(1).tolist()


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)
