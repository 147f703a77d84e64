"""Training batches: a pure function of the seed and the step, so a resumed run sees the data it would have seen."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Encoding, Tokenizer
from torch import Tensor

from tools.train_embedded.documents import Document, Kind, document

__all__ = ["Batch", "Stage", "make_batch", "stage_at", "token_kinds"]


@dataclass(frozen=True, slots=True)
class Stage:
    """Up to step `until`, sequence lengths are drawn with these shares.

    focus: share of fact conversations whose facts are of one or two kinds, so that only the right binding answers.
    people: share of these that are about people, and ask mostly who.
    prefer_people: in all of them names are asked for more often, and in the other focused ones people come more often.
    """

    until: int
    lengths: tuple[int, ...]
    shares: tuple[float, ...]
    focus: float = 0.0
    people: float = 0.0
    prefer_people: bool = False


@dataclass(frozen=True, slots=True)
class Batch:
    """tokens [B, T]; kinds [B, T], a `Kind` per token; scored: kinds with most of CONTEXT turned to PAD. All int64.

    Rows are one document each, cut or padded on the right.
    """

    tokens: Tensor
    kinds: Tensor
    scored: Tensor

    def part(self, rank: int, ranks: int) -> Batch:
        """Every `ranks`-th row, from row `rank` on."""
        return Batch(*(rows[rank::ranks] for rows in (self.tokens, self.kinds, self.scored)))


def stage_at(stages: Sequence[Stage], step: int) -> Stage:
    """The stage of `step`; the last one has no end."""
    return next((stage for stage in stages if step < stage.until), stages[-1])


def make_batch(
    tokenizer: Tokenizer, stage: Stage, tokens_per_batch: int, seed: int, step: int, context_share: float = 1.0
) -> Batch:
    """tokens_per_batch: rows times length, whatever the length drawn. context_share: of CONTEXT tokens scored."""
    rng = random.Random(f"batch {seed} {step}")
    length = rng.choices(stage.lengths, stage.shares)[0]
    rows = tokens_per_batch // length
    documents = [document(rng, length, stage.focus, stage.people, prefer_people=stage.prefer_people) for _ in range(rows)]
    tokens = np.zeros((rows, length), dtype=np.int64)
    kinds = np.zeros((rows, length), dtype=np.int64)
    encodings = tokenizer.encode_batch([d.text for d in documents], add_special_tokens=False)
    for row, (doc, encoding) in enumerate(zip(documents, encodings, strict=True)):
        ids = encoding.ids[:length]
        tokens[row, : len(ids)] = ids
        kinds[row, : len(ids)] = token_kinds(doc, encoding)[:length]
    skipped = np.random.default_rng([seed, step]).random(kinds.shape) >= context_share
    scored = np.where((kinds == Kind.CONTEXT) & skipped, int(Kind.PAD), kinds)
    return Batch(torch.from_numpy(tokens), torch.from_numpy(kinds), torch.from_numpy(scored))


def token_kinds(doc: Document, encoding: Encoding) -> list[int]:
    """The class of each token: that of its last character, since a word's token starts with the space before it."""
    return [doc.kinds[max(end - 1, start)] if end else int(Kind.CONTEXT) for start, end in encoding.offsets]
