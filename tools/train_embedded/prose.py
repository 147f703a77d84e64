"""Plain prose: sentences that state nothing the question tasks ask about, and short stories with a plot.

Every function draws from the `random.Random` it is given and from nothing else.
"""

from __future__ import annotations

import random

from tools.train_embedded.words import ADJECTIVES, ANIMALS, BOYS, FOODS, GIRLS, NAMES, OBJECTS, PLACES

__all__ = ["filler", "story"]

_SCENES = (
    "The sun was warm and the birds sang in the tall trees.",
    "A cold wind blew over the hills all day.",
    "It rained in the morning, but the afternoon was bright.",
    "The river was slow and clear, and small fish swam in it.",
    "Snow fell in the night and covered the roofs.",
    "The old road went up the hill and down to the sea.",
    "Nobody spoke for a while, and the fire burned low.",
    "The moon came up and the stars were very bright.",
    "In the evening the people sat together and told stories.",
    "The children ran home before it was dark.",
    "A grey cloud moved slowly across the sky.",
    "The leaves were falling and the days were short.",
    "There was a smell of fresh bread in the air.",
    "Far away a train went past and then it was quiet again.",
    "The streets were full of people, and everyone was busy.",
    "By noon the fog was gone and the boats went out.",
)
_ACTS = (
    "{name} walked slowly to the {place} and back again.",
    "{name} looked out and watched the rain for a long time.",
    "{name} and {other} talked about the weather.",
    "{name} said hello to {other} and smiled.",
    "A {adjective} {animal} slept near the {place}.",
    "{name} fed the {animal} and then went to bed.",
    "{name} was tired after the long walk.",
    "{name} sang a song while {other} danced.",
    "The {animal} ran across the road and was gone.",
    "{name} washed the dishes and swept the floor.",
    "{name} told {other} an old story about the sea.",
    "{name} and {other} played a game until supper.",
    "{name} had a {adjective} dream that night.",
    "A {adjective} {animal} came out of the {place} and looked around.",
    "{name} made soup, and {other} cut the bread.",
    "{name} waited for {other} near the {place}.",
    "{name} wrote a letter to {other} that day.",
    "{other} laughed, because {name} was telling a joke.",
    "{name} wanted to go to the {place}, but it was too late.",
    "The {place} was {adjective} and full of light.",
    "{name} bought some {food} and shared them with {other}.",
    "{name} went to sleep early and {other} read for an hour.",
)


def filler(rng: random.Random) -> str:
    """One sentence of small talk."""
    if rng.random() < 0.4:
        return rng.choice(_SCENES)
    name, other = rng.sample(NAMES, 2)
    return rng.choice(_ACTS).format(
        name=name,
        other=other,
        place=rng.choice(PLACES),
        animal=rng.choice(ANIMALS),
        adjective=rng.choice(ADJECTIVES),
        food=rng.choice(FOODS),
    )


_OPENINGS = (
    "One day {name} went to the {place}.",
    "Once there was a {child} called {name}.",
    "{name} was a {adjective} {child} who lived near the {place}.",
    "It was a fine morning, and {name} was alone in the {place}.",
    "Long ago, a {child} named {name} had a {adjective} {animal}.",
)
_PLOTS = (
    (
        "{Pronoun} was looking for a {adjective} {thing}.",
        "{Pronoun} looked everywhere, but the {thing} was not there.",
        'Then {friend} came and asked, "What are you looking for?"',
        '"I lost my {thing}," said {name}.',
        "They looked together, and at last {friend} found the {thing} under a tree.",
    ),
    (
        "{Pronoun} saw a {adjective} {animal} that could not walk.",
        '"Poor {animal}," said {name}, "I will help you."',
        "{name} gave it some water and stayed with it all day.",
        "{friend} brought a blanket to keep it warm.",
        "After three days the {animal} was well again.",
    ),
    (
        "{Pronoun} wanted to make a cake for {friend}.",
        "But there were no {food} in the house.",
        "So {name} walked to the market to buy some.",
        "On the way {pronoun} met a {adjective} {animal}, and it came along.",
        "In the evening {name} and {friend} ate the cake together.",
    ),
    (
        "{Pronoun} heard a {adjective} sound in the dark.",
        "At first {name} was afraid and wanted to run home.",
        "Then {pronoun} saw that it was only a {animal}.",
        '"You are not dangerous at all," said {name}.',
        "The next day {pronoun} told {friend} about it, and they both laughed.",
    ),
    (
        "{Pronoun} found a {adjective} {thing} near the river.",
        '"Whose {thing} is this?" asked {name}.',
        "{Pronoun} asked everyone, and in the end {pronoun} asked {friend}.",
        '"It is mine," said {friend}. "I lost it last week."',
        "{name} gave the {thing} back, and {friend} said thank you.",
    ),
    (
        "{Pronoun} and {friend} wanted to cross the river, but there was no bridge.",
        "They saw a {adjective} {animal} on the other side.",
        '"The water is too deep," said {friend}.',
        "So they took some wood and made a small boat.",
        "It took all day, but in the evening they came to the other side.",
    ),
)
_ENDINGS = (
    "From that day on they were good friends.",
    "{name} was very happy.",
    "Then they all went home and slept well.",
    "{friend} never forgot that day.",
    "And that is the end of the story.",
)


def story(rng: random.Random, name: str | None = None, thing: str | None = None) -> str:
    """A story of seven sentences or so; of the named person and thing where given."""
    hero = name or rng.choice(NAMES)
    girl = hero in GIRLS
    fields = {
        "name": hero,
        "child": "girl" if girl else "boy",
        "pronoun": "she" if girl else "he",
        "Pronoun": "She" if girl else "He",
        "friend": rng.choice([n for n in (BOYS if girl else GIRLS) if n != hero]),
        "thing": thing or rng.choice(OBJECTS),
        "animal": rng.choice(ANIMALS),
        "adjective": rng.choice([a for a in ADJECTIVES if a[0] not in "aeiou"]),
        "place": rng.choice(PLACES),
        "food": rng.choice(FOODS),
    }
    plots = [p for p in _PLOTS if thing is None or "{thing}" in p[0]]
    sentences = [rng.choice(_OPENINGS), *rng.choice(plots), rng.choice(_ENDINGS)]
    if rng.random() < 0.3:
        sentences.insert(1, rng.choice(_SCENES))
    return " ".join(s.format(**fields) for s in sentences)
