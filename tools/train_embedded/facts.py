"""Facts that a conversation states and later asks about.

A fact's key is unique within a conversation, and so is its value where a question runs from the value to the key. In
answers, square brackets mark the words that only the earlier text can tell. They come last, after the words of the
question: so the answer's first token, which a prefill worker samples, decides nothing, and what decides is decoded from
the state that travelled.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from tools.train_embedded.words import ANIMALS, COLOURS, FOODS, JOBS, LOCKED, NAMES, OBJECTS, PLACES, TOWNS, made_up

__all__ = ["Fact", "World"]


@dataclass(frozen=True, slots=True)
class Fact:
    """statement: one or more sentences. questions: (question, marked answer) pairs. unknown: the question of a fact untold."""

    statement: str
    questions: tuple[tuple[str, str], ...]


@dataclass(slots=True)
class World:
    """Draws facts that do not contradict each other. Raises no error when words run out: `fact` then returns None.

    focused: facts are of one or two kinds, rare ones as often as the others. about_people: these kinds are about people, who
    mostly stand before what is told of them. prefers_people: kinds about people come more often, and names are asked for more.
    """

    rng: random.Random
    focused: bool = False
    about_people: bool = False
    prefers_people: bool = False
    used: set[tuple[str, str]] = field(default_factory=set)
    kinds: list[Callable[[World], Fact | None]] = field(default_factory=list)

    def fact(self) -> Fact | None:
        """A new fact of a random kind, or None after several clashes."""
        if self.focused and not self.kinds:
            self.kinds = self._one_or_two_kinds()
        for _ in range(8):
            made = (self.rng.choice(self.kinds) if self.kinds else self.rng.choices(_KINDS, _SHARES)[0])(self)
            if made is not None:
                return made
        return None

    def _one_or_two_kinds(self) -> list[Callable[[World], Fact | None]]:
        count = self.rng.randint(1, 2)
        if self.about_people:
            return self.rng.sample(_ABOUT_PEOPLE, count)
        if self.prefers_people:
            return self.rng.choices(_KINDS, _PREFERRED_SHARES, k=count)
        return self.rng.sample(_KINDS, count)

    def claim(self, *keys: tuple[str, str]) -> bool:
        """Take all keys, or none if one is taken."""
        if any(key in self.used for key in keys):
            return False
        self.used.update(keys)
        return True

    def unknown(self) -> tuple[str, str] | None:
        """A question about something nobody told, and its answer.

        Its first word is not marked: weighing it above the first word of the other answers would teach to say it in doubt.
        """
        rng = self.rng
        colour, thing, place = rng.choice(COLOURS), rng.choice(OBJECTS), rng.choice(OBJECTS)
        if rng.random() < 0.5:
            if ("has", f"{colour} {thing}") in self.used:
                return None
            return f"Who has the {colour} {thing}?", f"I do [not] know who has the {colour} {thing}."
        if ("at", place) in self.used:
            return None
        return f"Where is the {place}?", f"I do [not] know where the {place} is."


_MADE_UP_SHARE = 0.06


def _name(rng: random.Random) -> str:
    return made_up(rng).capitalize() if rng.random() < _MADE_UP_SHARE else rng.choice(NAMES)


def _thing(rng: random.Random) -> str:
    return made_up(rng) if rng.random() < _MADE_UP_SHARE else rng.choice(OBJECTS)


def _has(world: World) -> Fact | None:
    rng = world.rng
    name, thing = _name(rng), f"{rng.choice(COLOURS)} {_thing(rng)}"
    if not world.claim(("has", thing), ("holder", name)):
        return None
    statement = rng.choice(
        [f"{name} has the {thing}.", f"{name} has the {thing}.", f"The {thing} is with {name}.", f"{name} took the {thing}."]
    )
    who = rng.choice([f"Who has the {thing}?", f"Who has the {thing}?", f"Tell me who has the {thing}."])
    return Fact(statement, ((who, f"The {thing} is with [{name}]."), (f"What does {name} have?", f"{name} has the [{thing}].")))


def _gave(world: World) -> Fact | None:
    rng = world.rng
    (giver, taker), thing = rng.sample(NAMES, 2), f"{rng.choice(COLOURS)} {rng.choice(OBJECTS)}"
    if not world.claim(("has", thing), ("holder", giver), ("holder", taker)):
        return None
    return Fact(
        f"{giver} gave the {thing} to {taker}.",
        (
            (f"Who has the {thing} now?", f"The {thing} is now with [{taker}]."),
            (f"Who gave the {thing} away?", f"The {thing} came from [{giver}]."),
        ),
    )


def _at(world: World) -> Fact | None:
    rng = world.rng
    thing, place = _thing(rng), rng.choice(PLACES)
    if not world.claim(("at", thing), ("place", place)):
        return None
    statement = rng.choice(
        [f"The {thing} is in the {place}.", f"The {thing} is in the {place}.", f"In the {place} there is a {thing}."]
    )
    statement = statement.replace(" a umbrella", " an umbrella")
    where = rng.choice([f"Where is the {thing}?", f"Where is the {thing}?", f"Tell me where the {thing} is."])
    return Fact(
        statement,
        ((where, f"The {thing} is in the [{place}]."), (f"What is in the {place}?", f"In the {place} is the [{thing}].")),
    )


def _animal(world: World) -> Fact | None:
    rng = world.rng
    animal, place = rng.choice(ANIMALS), rng.choice(PLACES)
    if not world.claim(("at", animal), ("place", place)):
        return None
    return Fact(
        f"The {animal} sleeps in the {place}.",
        (
            (f"Where does the {animal} sleep?", f"The {animal} sleeps in the [{place}]."),
            (f"Who sleeps in the {place}?", f"In the {place} sleeps the [{animal}]."),
        ),
    )


def _locked(world: World) -> Fact | None:
    """Two to four doors, exactly one of them locked."""
    rng = world.rng
    thing = rng.choice(LOCKED)
    if not world.claim(("locked", thing)):
        return None
    colours = rng.sample(COLOURS, rng.randint(2, 4))
    locked, opened = colours[0], colours[1]
    sentences = [f"The {c} {thing} is {'locked' if c == locked else 'open'}." for c in colours]
    rng.shuffle(sentences)
    return Fact(
        " ".join(sentences),
        (
            (f"Which {thing} is locked?", f"The locked {thing} is the [{locked}] one."),
            (f"Is the {locked} {thing} open or locked?", f"The {locked} {thing} is [locked]."),
            (f"Is the {opened} {thing} open or locked?", f"The {opened} {thing} is [open]."),
        ),
    )


def _colour(world: World) -> Fact | None:
    rng = world.rng
    name, thing, colour = _name(rng), _thing(rng), rng.choice(COLOURS)
    if not world.claim(("colour", f"{name} {thing}")):
        return None
    return Fact(f"{name}'s {thing} is {colour}.", ((f"What colour is {name}'s {thing}?", f"{name}'s {thing} is [{colour}]."),))


def _code(world: World) -> Fact | None:
    rng = world.rng
    thing, code = f"{rng.choice(COLOURS)} {rng.choice(LOCKED)}", str(rng.randint(10, 9999))
    if not world.claim(("code", thing)):
        return None
    return Fact(
        f"The code of the {thing} is {code}.", ((f"What is the code of the {thing}?", f"The code of the {thing} is [{code}]."),)
    )


def _pair(kind: str, values: tuple[str, ...], verb: str, what: str, who: str, who_is: str) -> Callable[[World], Fact | None]:
    """Facts of the form "name verb value.", asked both ways; the forms take {name} and {value}. who_is: the answer of who."""

    def make(world: World) -> Fact | None:
        name, value = _name(world.rng), world.rng.choice(values)
        if not world.claim((kind, name), (f"{kind} value", value)):
            return None
        return Fact(
            f"{name} {verb} {value}.",
            (
                (what.format(name=name), f"{name} {verb} [{value}]."),
                (who.format(value=value), f"{who_is.format(value=value)} [{name}]."),
            ),
        )

    return make


def _count(world: World) -> Fact | None:
    rng = world.rng
    name, food, count = rng.choice(NAMES), rng.choice(FOODS), rng.randint(2, 20)
    if not world.claim(("count", f"{name} {food}"), ("holder", name)):
        return None
    return Fact(f"{name} has {count} {food}.", ((f"How many {food} does {name} have?", f"{name} has [{count}] {food}."),))


_LIKES = _pair("likes", FOODS, "likes", "What does {name} like?", "Who likes {value}?", "The one who likes {value} is")
_LIVES = _pair(
    "lives", TOWNS, "lives in", "Where does {name} live?", "Who lives in {value}?", "The one who lives in {value} is"
)
_JOB = _pair("job", JOBS, "is the", "What is {name}'s job?", "Who is the {value}?", "The {value} is")

_Kinds = tuple[Callable[[World], Fact | None], ...]
_KINDS: _Kinds = (_has, _at, _locked, _colour, _code, _count, _gave, _animal, _LIKES, _LIVES, _JOB)
_SHARES = (5, 4, 2, 2, 2, 1, 1, 1, 1, 1, 1)
_PREFERRED_SHARES = (3, 1, 2, 1, 1, 1, 2, 1, 3, 3, 3)
_ABOUT_PEOPLE: _Kinds = (_has, _gave, _LIKES, _LIVES, _JOB)
