"""The held-out questions, each with the one answer that counts: recall by distance, words to repeat, sums."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from tools.train_embedded.exchanges import Exchange, sum_exchange, words_exchange
from tools.train_embedded.recall import DISTANCES, recall_questions

__all__ = ["HELD_OUT_SEED", "MOST_WORDS", "Asked", "held_out", "shares"]

HELD_OUT_SEED = 977
MOST_WORDS = 12


@dataclass(frozen=True, slots=True)
class Asked:
    """group: `recall N` (tokens between fact and question), `words` or `sums`. prompt: one user message. answer: all that the
    assistant is to say."""

    group: str
    prompt: str
    answer: str


def held_out(tokenizer: Tokenizer, number: int, distances: Sequence[int] = DISTANCES) -> list[Asked]:
    """`number` of each group. Equal arguments give equal questions; no training seed draws them."""
    asked = [
        Asked(f"recall {distance}", question.prompt, question.answer)
        for distance in distances
        for question in recall_questions(tokenizer, distance, number)
    ]
    rng = random.Random(HELD_OUT_SEED)
    asked += [_asked("words", words_exchange(rng, MOST_WORDS)) for _ in range(number)]
    return asked + [_asked("sums", sum_exchange(rng)) for _ in range(number)]


def _asked(group: str, made: Exchange) -> Asked:
    return Asked(group, made.question, re.sub(r"[\[\]]", "", made.answer))


def shares(asked: Sequence[Asked], right: Sequence[bool]) -> dict[str, float]:
    """By group, the share of questions that were answered right, in the order in which the groups first come."""
    verdicts: dict[str, list[bool]] = {}
    for question, verdict in zip(asked, right, strict=True):
        verdicts.setdefault(question.group, []).append(verdict)
    return {group: sum(found) / len(found) for group, found in verdicts.items()}
