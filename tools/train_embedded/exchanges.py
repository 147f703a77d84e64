"""Single questions with their answers that need no earlier text: sums, lists, copying, reversing, stories, small talk."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from tools.train_embedded.prose import story
from tools.train_embedded.words import ANIMALS, COLOURS, COMMON, FOODS, NAMES, OBJECTS, made_up

__all__ = ["Exchange", "exchange", "sum_exchange", "words_exchange"]


@dataclass(frozen=True, slots=True)
class Exchange:
    """question, and the answer with brackets around its decisive words; kind names the class of those words."""

    question: str
    answer: str
    kind: str


def _items(rng: random.Random, most: int) -> list[str]:
    if rng.random() < 0.1:
        return [made_up(rng) for _ in range(rng.randint(2, min(most, 5)))]
    words = rng.choice([OBJECTS, COMMON, COMMON, ANIMALS, COLOURS, NAMES, OBJECTS + ANIMALS + NAMES])
    return rng.sample(words, min(rng.randint(2, most), len(words)))


def _copy(rng: random.Random, most: int) -> Exchange:
    words = " ".join(_items(rng, most))
    return Exchange(rng.choice(["Repeat: ", "Say this again: ", "Copy these words: "]) + words, f"[{words}]", "copy")


def _reverse(rng: random.Random, most: int) -> Exchange:
    words = _items(rng, min(most, 6))
    return Exchange(
        rng.choice(["Say these words backwards: ", "Reverse: "]) + " ".join(words), f"[{' '.join(reversed(words))}]", "copy"
    )


def _list(rng: random.Random, most: int) -> Exchange:
    words = _items(rng, min(most, 8))
    told = f"Here is a list: {', '.join(words)}. "
    which, word = rng.choice([("first", words[0]), ("last", words[-1]), ("second", words[1])])
    if rng.random() < 0.25:
        return Exchange(told + "How many words are in the list?", f"There are [{len(words)}] words in the list.", "copy")
    return Exchange(told + f"What is the {which} word?", f"The {which} word is [{word}].", "copy")


def words_exchange(rng: random.Random, most: int) -> Exchange:
    """Copying, reversing or a question on a list, of up to `most` words."""
    return rng.choices((_copy, _reverse, _list), (5, 2, 3))[0](rng, most)


def sum_exchange(rng: random.Random) -> Exchange:
    a, b = rng.randint(0, 20), rng.randint(0, 20)
    if rng.random() < 0.5:
        form = rng.random()
        if form < 0.6:
            return Exchange(f"What is {a} plus {b}?", f"{a} plus {b} is [{a + b}].", "sum")
        high, low = max(a, b), min(a, b)
        return Exchange(f"What is {high} minus {low}?", f"{high} minus {low} is [{high - low}].", "sum")
    (name, other), food = rng.sample(NAMES, 2), rng.choice(FOODS)
    a, b = rng.randint(2, 12), rng.randint(2, 12)
    if rng.random() < 0.6:
        text = f"{name} has {a} {food}. {other} gives {name} {b} more. How many {food} does {name} have now?"
        return Exchange(text, f"{a} plus {b} is [{a + b}]. {name} has [{a + b}] {food} now.", "sum")
    a += b
    text = f"{name} has {a} {food}. {name} gives {b} of them to {other}. How many {food} does {name} have now?"
    return Exchange(text, f"{a} minus {b} is [{a - b}]. {name} has [{a - b}] {food} now.", "sum")


def _story(rng: random.Random) -> Exchange:
    name, thing = rng.choice(NAMES), rng.choice(OBJECTS)
    if rng.random() < 0.5:
        return Exchange(f"Tell me a story about {name}.", story(rng, name), "prose")
    article = "an" if thing[0] in "aeiou" else "a"
    return Exchange(f"Tell me a story about {name} and {article} {thing}.", story(rng, name, thing), "prose")


_TALK = (
    ("Hello!", "Hello! How can I help you?"),
    ("Hi", "Hello! How can I help you?"),
    ("Good morning!", "Good morning! How can I help you?"),
    ("Who are you?", "I am a very small model that ships with tandem."),
    ("What is your name?", "I have no name. I am the small model that ships with tandem."),
    (
        "What can you do?",
        "I can answer questions about what you tell me, add small numbers, repeat words and tell short stories.",
    ),
    ("Thank you!", "You are welcome."),
    ("Thanks", "You are welcome."),
    ("How are you?", "I am well, thank you."),
    ("Goodbye!", "Goodbye!"),
)


def _talk(rng: random.Random) -> Exchange:
    return Exchange(*rng.choice(_TALK), "prose")


def exchange(rng: random.Random) -> Exchange:
    """Any of the above."""
    kinds: tuple[Callable[[random.Random], Exchange], ...] = (lambda r: words_exchange(r, 12), sum_exchange, _story, _talk)
    return rng.choices(kinds, (4, 4, 2, 1))[0](rng)
