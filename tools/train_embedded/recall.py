"""The held-out questions: a fact, text of a given length after it, then a question that only the fact answers."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from tokenizers import Tokenizer

from tools.train_embedded.facts import World
from tools.train_embedded.prose import filler

__all__ = ["DISTANCES", "RecallQuestion", "recall_questions"]

DISTANCES = (32, 128, 500, 1000, 1500)


@dataclass(frozen=True, slots=True)
class RecallQuestion:
    """prompt: one user message. answer: what the assistant says, all of it. distance: tokens from the fact to the question."""

    prompt: str
    answer: str
    distance: int


def _question(rng: random.Random, tokenizer: Tokenizer, distance: int) -> RecallQuestion:
    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    world = World(rng)
    fact = None
    while fact is None:
        fact = world.fact()
    before = [filler(rng) for _ in range(rng.randint(0, 2))]
    others = [other.statement for _ in range(min(10, distance // 24)) if (other := world.fact()) is not None]
    room = distance - count(" " + " ".join(others)) if others else distance
    talk: list[str] = []
    while room > 14:
        talk.append(filler(rng))
        room -= count(" " + talk[-1])
    after = others + talk
    rng.shuffle(after)
    asked, answer = rng.choice(fact.questions)
    between = " ".join(after)
    prompt = " ".join([*before, fact.statement, *after, asked])
    return RecallQuestion(prompt, re.sub(r"[\[\]]", "", answer), count(" " + between) if between else 0)


def recall_questions(tokenizer: Tokenizer, distance: int, number: int, seed: int = 1) -> list[RecallQuestion]:
    """`number` questions at about `distance` tokens; equal arguments give equal questions. No training seed draws them."""
    return [_question(random.Random(f"held-out {seed} {distance} {i}"), tokenizer, distance) for i in range(number)]
