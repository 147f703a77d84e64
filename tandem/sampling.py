"""Drawing the next token, for a whole batch at once, as a function of (logits, parameters, seed, position).

No generator state exists: the random numbers of a draw are hashes of the request's seed, the index of the token in the
sequence, and the candidate's id. So the same request gives the same tokens alone or among strangers, on any worker, and after a
resumption. The logits of a resumed sequence differ by rounding; a draw by inverse CDF would turn that into another token
wherever two neighbours change their order, or a border moves. Here each candidate has a number of its own, and the draw changes
only where the two best are as near to each other as the rounding: with a vocabulary of 50,000, temperature 0.8 and
bf16-like noise of 0.01 that is one draw in 200, where inverse CDF changes every second one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from tandem.adjust import Adjustment, TokenHistory, adjust
from tandem.errors import HandoffError, TandemError
from tandem.grammar import GrammarState
from tandem.request import Request, SamplingParams

__all__ = ["Draw", "SequenceSampler", "sample", "sample_each", "uniforms"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MASK64 = (1 << 64) - 1
_GAMMA, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # SplitMix64's


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


def uniforms(draws: Sequence[tuple[int, int]], num_ids: int, device: torch.device | None = None) -> torch.Tensor:
    """Numbers in (0, 1), fp64 `[R, V]`: row r from the 64-bit seed and the position `draws[r]`, column v from the id v.

    SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014): its finaliser over seed and
    position gives a row's state, its sequence from there the row. Top 52 bits: the half that keeps 0 and 1 out is exact.
    """
    states = [[_signed(_state(seed, position))] for seed, position in draws]
    steps_V = torch.arange(1, num_ids + 1, device=device) * _signed(_GAMMA)  # int64 wraps, as it must
    z_RV = torch.tensor(states, dtype=torch.int64, device=device) + steps_V
    z_RV = (z_RV ^ _shifted(z_RV, 30)) * _signed(_MIX_1)
    z_RV = (z_RV ^ _shifted(z_RV, 27)) * _signed(_MIX_2)
    z_RV = z_RV ^ _shifted(z_RV, 31)
    return (_shifted(z_RV, 12).double() + 0.5) * 2.0**-52


def sample(logits_BV: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """Token ids, one per row of `logits_BV` (fp32 `[B, V]`, finite; not changed).

    Logits are adjusted first (see `tandem.adjust`). Greedy rows take the largest, the lowest id among equals. Other rows are
    divided by temperature, cut to top_k, then to top_p over the renormalised rest, then to min_p; of what is kept they take the
    largest sum of logit and Gumbel noise, which is a draw from its softmax (Gumbel, 1954).
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


def sample_each(logits_BV: torch.Tensor, draws: Sequence[Callable[[], Draw]]) -> list[int | TandemError]:
    """As `sample`, but what goes wrong with a row ends that row alone: it gets the error instead of a token.

    draws: make the draw of each row. logits_BV: may hold rows that are not finite; those get an error.
    """
    outcomes: list[int | TandemError] = []
    ready: dict[int, Draw] = {}
    for row, (is_finite, make_draw) in enumerate(zip(logits_BV.amax(dim=-1).isfinite().tolist(), draws, strict=True)):
        outcomes.append(HandoffError("the model's logits are not finite"))
        if is_finite:
            outcome = _guarded(make_draw)
            if isinstance(outcome, Draw):
                ready[row] = outcome
            else:
                outcomes[row] = outcome
    rows = list(ready)
    some_RV = logits_BV if len(rows) == len(outcomes) else logits_BV[rows]
    drawn = _guarded(lambda: sample(some_RV, list(ready.values())))
    if isinstance(drawn, TandemError):  # somebody in there spoils it for all: each by itself
        drawn = [_guarded(lambda row=row: sample(logits_BV[row : row + 1], [ready[row]])[0]) for row in rows]  # type: ignore[misc]
    for row, token in zip(rows, drawn, strict=True):
        outcomes[row] = token
    return outcomes


def _guarded(act: Callable[[], T]) -> T | TandemError:
    try:
        return act()
    except TandemError as error:
        return error
    except Exception:  # whatever it is, it is one row's: the others go on
        logger.exception("a token could not be drawn")
        return HandoffError("a token could not be drawn on this worker; see its log")


def _sample_rows(logits_RV: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    params = [draw.params for draw in draws]
    # fp64 from here: a tiny temperature must not overflow.
    scaled_RV = (logits_RV.double() - logits_RV.amax(dim=-1, keepdim=True)) / _column(
        [p.temperature for p in params], logits_RV
    )
    if any(p.top_k or p.top_p < 1 for p in params):
        scaled_RV = scaled_RV.masked_fill(~_nucleus(scaled_RV, params), -math.inf)
    # Relative to the largest, whose logit is 0 here.
    scaled_RV = scaled_RV.masked_fill(scaled_RV.exp() < _column([p.min_p for p in params], logits_RV), -math.inf)
    uniforms_RV = uniforms([(d.params.seed, d.position) for d in draws], logits_RV.shape[1], logits_RV.device)
    tokens: list[int] = (scaled_RV - (-uniforms_RV.log()).log()).argmax(dim=-1).tolist()
    return tokens


def _nucleus(scaled_RV: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Which ids top_k and top_p keep, bool `[R, V]`: the likeliest always."""
    vocab = scaled_RV.shape[1]
    sorted_RV, ids_RV = scaled_RV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(vocab, device=scaled_RV.device).unsqueeze(0)
    probs_RV = torch.softmax(sorted_RV, dim=-1).masked_fill(
        rank_V >= _column([p.top_k or vocab for p in params], scaled_RV), 0.0
    )
    probs_RV = probs_RV / probs_RV.sum(dim=-1, keepdim=True)
    before_RV = probs_RV.cumsum(dim=-1) - probs_RV
    kept_RV = (probs_RV > 0) & ((before_RV < _column([p.top_p for p in params], scaled_RV)) | (rank_V == 0))
    return torch.zeros_like(kept_RV).scatter(1, ids_RV, kept_RV)


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device).unsqueeze(1)


def _state(seed: int, position: int) -> int:
    return _mix(_mix((seed + _GAMMA) & _MASK64) ^ (position * 0xD1342543DE82EF95 & _MASK64))


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * _MIX_1) & _MASK64
    z = ((z ^ (z >> 27)) * _MIX_2) & _MASK64
    return z ^ (z >> 31)


def _signed(value: int) -> int:
    """The int64 of the same 64 bits."""
    return value - (1 << 64) if value >> 63 else value


def _shifted(z: torch.Tensor, bits: int) -> torch.Tensor:
    """To the right, with zeros: torch's own shift of int64 repeats the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
