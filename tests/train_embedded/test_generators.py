"""Invariants of the generated texts: seeded, consistent, and labelled so that the loss falls where it should."""

from __future__ import annotations

import random
import re

import pytest

from tools.train_embedded.documents import IM_END, IM_START, Kind, document, estimated_tokens
from tools.train_embedded.exchanges import exchange, sum_exchange, words_exchange
from tools.train_embedded.facts import World
from tools.train_embedded.prose import filler, story
from tools.train_embedded.recipe import CURRICULUM


def _spans(text: str, kinds: bytes, kind: Kind) -> list[str]:
    spans, current = [], ""
    for character, found in zip(text, kinds, strict=True):
        if found == kind:
            current += character
        elif current:
            spans.append(current)
            current = ""
    return [*spans, current] if current else spans


@pytest.mark.parametrize("length", [128, 512, 2048])
def test_equal_seeds_give_equal_documents(length: int) -> None:
    assert document(random.Random("a"), length) == document(random.Random("a"), length)
    assert document(random.Random("a"), length) != document(random.Random("b"), length)


@pytest.mark.parametrize("length", [128, 512, 2048])
def test_every_character_has_a_class_and_lengths_are_near_the_wanted(length: int) -> None:
    for seed in range(20):
        made = document(random.Random(seed), length)
        assert len(made.text) == len(made.kinds)
        assert Kind.PAD not in made.kinds
        assert estimated_tokens(made.text) < length * 1.9 + 120


def test_recalled_words_stand_earlier_in_the_conversation() -> None:
    checked = 0
    for seed in range(60):
        made = document(random.Random(seed), 256)
        for word in _spans(made.text, made.kinds, Kind.RECALL):
            if word == "not":
                continue
            assert made.text.count(word) >= 2, (seed, word)
            checked += 1
    assert checked > 50


def test_the_decisive_words_end_the_answer() -> None:
    """So they are decoded from the state that travelled; a prefill worker samples the answer's first token alone."""
    for seed in range(60):
        world = World(random.Random(seed))
        facts = [fact for _ in range(20) if (fact := world.fact()) is not None]
        for _, answer in (question for fact in facts for question in fact.questions):
            before, decisive, after = re.split(r"[\[\]]", answer)
            assert len(before.split()) >= 2, answer
            assert decisive, answer
            assert len(after.split()) <= 1, answer


@pytest.mark.parametrize("length", [128, 512, 2048])
def test_documents_are_full_of_questions(length: int) -> None:
    """Long rows are few in a batch: each must ask about as often, by tokens, as a short one does."""
    made = [document(random.Random(f"full {seed}"), length, 0.5) for seed in range(16384 // length)]
    recalled = sum(len(_spans(one.text, one.kinds, Kind.RECALL)) for one in made)
    assert recalled * 110 > length * len(made), recalled


def test_conversations_about_people_ask_mostly_who() -> None:
    asks = re.compile(r"(Who|What|Where|How|Tell me|Is|Which) [^?.]*[?.]")
    kinds = {"all": (1.0, 0.0), "people": (1.0, 1.0)}
    who = {}
    for name, how in kinds.items():
        made = [document(random.Random(f"people {seed}"), 128, *how) for seed in range(80)]
        found = [m[0] for one in made if Kind.RECALL in one.kinds for m in asks.finditer(one.text)]
        who[name] = sum(asked.startswith(("Who", "Tell me who")) for asked in found) / len(found)
    assert who["people"] > 0.8 > 2 * who["all"], who


def test_every_mix_of_a_stage_gives_documents() -> None:
    for stage in CURRICULUM:
        for length in stage.lengths:
            for seed in range(4096 // length):
                assert document(random.Random(f"mix {seed}"), length, stage.focus, stage.people).text


def test_turns_alternate_and_close() -> None:
    for seed in range(40):
        text = document(random.Random(seed), 256).text
        if text.startswith(IM_START):
            turns = [part.split("\n", 1)[0] for part in text.split(IM_START)[1:]]
            spoken = turns[1:] if turns[0] == "system" else turns
            assert spoken == ["user", "assistant"] * (len(spoken) // 2)
            assert text.count(IM_START) == text.count(IM_END)


def test_facts_of_a_world_never_share_a_question() -> None:
    for seed in range(40):
        world = World(random.Random(seed))
        facts = [fact for _ in range(20) if (fact := world.fact()) is not None]
        answers: dict[str, str] = {}
        for fact in facts:
            for asked, answer in fact.questions:
                assert answers.setdefault(asked, answer) == answer


def test_sums_are_right() -> None:
    for seed in range(200):
        answer = sum_exchange(random.Random(seed)).answer.split(".")[0]
        left, sign, right, _, total = answer.replace("[", "").replace("]", "").split()
        assert int(total) == (int(left) + int(right) if sign == "plus" else int(left) - int(right))
        assert int(total) >= 0


def test_copies_repeat_and_reversals_reverse() -> None:
    seen = set()
    for seed in range(200):
        made = words_exchange(random.Random(seed), 8)
        words = made.answer.strip("[]").split()
        if made.question.startswith(("Repeat", "Say this again", "Copy")):
            assert made.question.endswith(" ".join(words))
            seen.add("copy")
        if made.question.startswith(("Reverse", "Say these words backwards")):
            assert made.question.endswith(" ".join(reversed(words)))
            seen.add("reverse")
    assert seen == {"copy", "reverse"}


def test_texts_hold_no_unfilled_slot_and_no_marker() -> None:
    rng = random.Random(3)
    for _ in range(200):
        assert not set("{}[]") & set(story(rng) + filler(rng) + exchange(rng).question)
