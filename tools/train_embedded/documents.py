"""Documents to train on: conversations and prose of about a wanted length, each character with a class.

The class says what the model can know: CONTEXT is told by the user, ANSWER is the assistant's phrasing, RECALL, COPY and SUM
are the words that answer the question, PROSE is free text.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from tools.train_embedded.exchanges import Exchange, exchange, sum_exchange, words_exchange
from tools.train_embedded.facts import Fact, World
from tools.train_embedded.prose import filler, story

__all__ = ["END_OF_TEXT", "IM_END", "IM_START", "Document", "Kind", "Writer", "document", "estimated_tokens"]

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"


class Kind(IntEnum):
    """Class of a character or token."""

    PAD = 0
    CONTEXT = 1
    ANSWER = 2
    RECALL = 3
    COPY = 4
    SUM = 5
    PROSE = 6


_MARKED = {"recall": Kind.RECALL, "copy": Kind.COPY, "sum": Kind.SUM, "prose": Kind.PROSE}


@dataclass(frozen=True, slots=True)
class Document:
    """kinds: one byte per character of text, a `Kind` each."""

    text: str
    kinds: bytes


def estimated_tokens(text: str) -> int:
    """Words, digits and marks: what a tokenizer that knows every word makes of the text."""
    return len(re.findall(r"[A-Za-z]+|\d|[^\w\s]", text))


@dataclass(slots=True)
class Writer:
    """Collects turns of a conversation. `tokens` is an estimate."""

    parts: list[tuple[str, Kind]] = field(default_factory=list)
    tokens: int = 0

    def add(self, text: str, kind: Kind) -> None:
        self.parts.append((text, kind))
        self.tokens += estimated_tokens(text)

    def user(self, text: str, role: str = "user") -> None:
        self.parts.append((f"{IM_START}{role}\n{text}{IM_END}\n", Kind.CONTEXT))
        self.tokens += estimated_tokens(text) + 5

    def assistant(self, marked: str, kind: str) -> None:
        """marked: the answer with brackets around its decisive words, which take the class of `kind`."""
        self.parts.append((f"{IM_START}assistant\n", Kind.CONTEXT))
        plain = Kind.PROSE if kind == "prose" else Kind.ANSWER
        for i, piece in enumerate(re.split(r"[\[\]]", marked)):
            self.parts.append((piece, _MARKED[kind] if i % 2 else plain))
        self.parts.append((IM_END, Kind.ANSWER))
        self.parts.append(("\n", Kind.CONTEXT))
        self.tokens += estimated_tokens(marked) + 5

    def document(self) -> Document:
        return Document("".join(t for t, _ in self.parts), b"".join(bytes([k]) * len(t) for t, k in self.parts))


@dataclass(frozen=True, slots=True)
class _Level:
    """Up to this document length: the share of tokens for questions with answers, facts per round, words to repeat, and how
    often a document is a conversation about facts, a row of tasks or prose.

    Long documents are few in a batch, so most of them must be full of questions.
    """

    length: int
    asked_share: tuple[float, float]
    most_facts: int
    most_words: int
    mix: tuple[int, int, int]


_LEVELS = (
    _Level(64, (0.5, 0.75), 3, 4, (65, 25, 10)),
    _Level(128, (0.4, 0.7), 7, 12, (65, 27, 8)),
    _Level(512, (0.25, 0.7), 16, 16, (80, 16, 4)),
    _Level(1 << 30, (0.2, 0.65), 24, 16, (92, 6, 2)),
)


def _level(length: int) -> _Level:
    return next(level for level in _LEVELS if length <= level.length)


_ASKED_TOKENS = 16  # of a question with its answer
_ASKED_TOGETHER = (1, 1, 2, 4)  # the most questions of a turn: a conversation's habit
_WHO_SHARE = 0.8
_ASKS_WHO = re.compile("(Who|Tell me who) ")
_PREFERRED = 4  # times as often is a person's name asked for
_NAME = re.compile(r"\[[A-Z]")


def _facts_conversation(rng: random.Random, length: int, focus: float, people: float, prefer_people: bool) -> Document:
    """Facts among small talk, then questions about them; long conversations tell and ask in a few rounds."""
    writer = Writer()
    if rng.random() < 0.1:
        writer.user("You are a helpful assistant.", "system")
    focused, about_people = (share > 0.0 and rng.random() < share for share in (focus, people))
    world = World(rng, focused, about_people, prefer_people)
    known: list[Fact] = []
    rounds = 1 if length <= 128 else rng.randint(1, 2) if length <= 512 else rng.choice((1, 1, 2, 4))
    for number in range(1, rounds + 1):
        limit = writer.tokens + (length - writer.tokens) // (rounds - number + 1)
        _round(rng, writer, world, known, limit, length)
    return writer.document()


def _round(rng: random.Random, writer: Writer, world: World, known: list[Fact], limit: int, length: int) -> None:
    budget = limit - writer.tokens
    level = _level(length)
    telling = max(int(budget * (1.0 - rng.uniform(*level.asked_share))), 8)
    most = max(1, min(telling // 8, level.most_facts))
    facts = [fact for _ in range(rng.randint((most + 1) // 2, most)) if (fact := world.fact()) is not None]
    told = [fact.statement for fact in facts]
    talk: list[str] = []
    room = telling - sum(map(estimated_tokens, told))
    while room > 14:
        talk.append(filler(rng))
        room -= estimated_tokens(talk[-1])
    known.extend(facts)
    opening = " ".join(_arranged(rng, told, talk))
    pending = opening + (" " if rng.random() < 0.7 else "\n") if opening else ""
    questions: list[tuple[str, str]] = []
    together = rng.choice(_ASKED_TOGETHER)
    while True:
        if not questions:  # all were asked: the same facts again, from farther away
            questions = _questions(rng, world, known)
        room = max(1, (limit - writer.tokens - 10) // _ASKED_TOKENS)
        turn = [questions.pop() for _ in range(min(rng.randint(1, together), room, len(questions)))]
        writer.user(pending + " ".join(asked for asked, _ in turn))
        writer.assistant(" ".join(answer for _, answer in turn), "recall")
        pending = ""
        if writer.tokens + 10 + _ASKED_TOKENS > limit:
            return


def _arranged(rng: random.Random, told: list[str], talk: list[str]) -> list[str]:
    """Facts first, facts last, or facts scattered among the small talk."""
    form = rng.random()
    if form < 0.35:
        return told + talk
    if form < 0.45:
        return talk + told
    mixed = told + talk
    order = list(range(len(mixed)))
    rng.shuffle(order)
    return [mixed[i] for i in order]


def _questions(rng: random.Random, world: World, known: list[Fact]) -> list[tuple[str, str]]:
    questions = [_question(rng, world, fact) for fact in known]
    rng.shuffle(questions)
    if rng.random() < 0.1 and (unknown := world.unknown()) is not None:
        questions.append(unknown)
    rng.shuffle(questions)
    return questions


def _question(rng: random.Random, world: World, fact: Fact) -> tuple[str, str]:
    """In a conversation about people, most questions ask who."""
    asked: Sequence[tuple[str, str]] = fact.questions
    if world.focused and world.about_people and rng.random() < _WHO_SHARE:
        asked = [question for question in fact.questions if _ASKS_WHO.match(question[0])]
    if world.prefers_people:
        return rng.choices(asked, [_PREFERRED if _NAME.search(answer) else 1 for _, answer in asked])[0]
    return rng.choice(asked)


def _tasks_conversation(rng: random.Random, length: int, *_: float) -> Document:
    """Copying, lists and sums, one after another."""
    writer = Writer()
    style = rng.random()
    while True:
        if style < 0.5:
            made = words_exchange(rng, _level(length).most_words)
        elif style < 0.8:
            made = sum_exchange(rng)
        else:
            made = exchange(rng)
        _write(writer, made)
        if writer.tokens + 20 > length:
            return writer.document()


def _write(writer: Writer, made: Exchange) -> None:
    writer.user(made.question)
    writer.assistant(made.answer, made.kind)


def _prose(rng: random.Random, length: int, *_: float) -> Document:
    writer = Writer()
    while writer.tokens < length:
        text = story(rng) if rng.random() < 0.6 else " ".join(filler(rng) for _ in range(rng.randint(3, 8)))
        writer.add(text + "\n", Kind.PROSE)
        if length <= 128:
            break
    writer.add(END_OF_TEXT, Kind.PROSE)
    return writer.document()


def document(
    rng: random.Random, length: int, focus: float = 0.0, people: float = 0.0, *, prefer_people: bool = False
) -> Document:
    """A document of about `length` tokens; a longer one is to be cut by the caller. The rest as in `Stage`."""
    makers = (_facts_conversation, _tasks_conversation, _prose)
    return rng.choices(makers, _level(length).mix)[0](rng, length, focus, people, prefer_people)
