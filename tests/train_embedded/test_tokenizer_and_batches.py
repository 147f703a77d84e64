"""The tokeniser loses nothing, and a batch is a function of seed and step."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.train_embedded.batches import Stage, make_batch, stage_at, token_kinds
from tools.train_embedded.documents import IM_END, IM_START, Kind, document
from tools.train_embedded.recall import recall_questions
from tools.train_embedded.tokenizer import train_tokenizer, write_tokenizer

_TOKENIZER = train_tokenizer(700, seed=0, documents=60)
_STAGE = Stage(1, (128,), (1.0,))


@settings(max_examples=100, deadline=None)
@given(st.text())
def test_any_text_survives_a_round_trip(text: str) -> None:
    ids = _TOKENIZER.encode(text, add_special_tokens=False).ids
    special = any(mark in text for mark in ("<|endoftext|>", IM_START, IM_END))
    assert special or _TOKENIZER.decode(ids, skip_special_tokens=False) == text


def test_training_is_deterministic() -> None:
    assert train_tokenizer(700, seed=0, documents=60).to_str() == _TOKENIZER.to_str()


def test_digits_stay_apart_and_chat_marks_are_one_token() -> None:
    assert len(_TOKENIZER.encode("4711", add_special_tokens=False).ids) == 4
    assert len(_TOKENIZER.encode(IM_START + IM_END, add_special_tokens=False).ids) == 2


def test_batches_depend_on_seed_and_step_alone() -> None:
    first = make_batch(_TOKENIZER, _STAGE, 512, seed=1, step=5, context_share=0.5)
    make_batch(_TOKENIZER, _STAGE, 512, seed=1, step=6)
    again = make_batch(_TOKENIZER, _STAGE, 512, seed=1, step=5, context_share=0.5)
    other = make_batch(_TOKENIZER, _STAGE, 512, seed=2, step=5, context_share=0.5)
    assert torch.equal(first.tokens, again.tokens)
    assert torch.equal(first.scored, again.scored)
    assert not torch.equal(first.tokens, other.tokens)


def test_parts_of_a_batch_cover_it_once() -> None:
    batch = make_batch(_TOKENIZER, _STAGE, 512, seed=1, step=0)
    rows = torch.cat([batch.part(rank, 2).tokens for rank in range(2)])
    assert sorted(rows.tolist()) == sorted(batch.tokens.tolist())


def test_only_context_goes_unscored() -> None:
    batch = make_batch(_TOKENIZER, _STAGE, 512, seed=1, step=0, context_share=0.0)
    assert not (batch.scored == Kind.CONTEXT).any()
    kept = batch.kinds != Kind.CONTEXT
    assert torch.equal(batch.scored[kept], batch.kinds[kept])


def test_a_tokens_class_is_that_of_its_word() -> None:
    made = next(d for seed in range(50) if Kind.RECALL in (d := document(random.Random(seed), 128)).kinds)
    encoding = _TOKENIZER.encode(made.text, add_special_tokens=False)
    kinds = token_kinds(made, encoding)
    recalled = "".join(made.text[s:e] for (s, e), k in zip(encoding.offsets, kinds, strict=True) if k == Kind.RECALL)
    spelled = "".join(c for c, k in zip(made.text, made.kinds, strict=True) if k == Kind.RECALL)
    assert recalled.replace(" ", "") == spelled.replace(" ", "")


@pytest.mark.parametrize(("step", "expected"), [(0, 0), (49, 0), (50, 1), (1000, 1)])
def test_stages_follow_the_step(step: int, expected: int) -> None:
    stages = (Stage(50, (128,), (1.0,)), Stage(100, (512,), (1.0,)))
    assert stage_at(stages, step) is stages[expected]


@pytest.mark.parametrize("distance", [32, 128, 500])
def test_held_out_questions_stand_at_their_distance(distance: int) -> None:
    for question in recall_questions(_TOKENIZER, distance, 10):
        assert abs(question.distance - distance) <= 48
    assert recall_questions(_TOKENIZER, distance, 3) == recall_questions(_TOKENIZER, distance, 3)


def test_transformers_reads_tokeniser_and_chat_template(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_tokenizer(_TOKENIZER, tmp_path, 4096)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = loaded.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    assert text == f"{IM_START}user\nHi{IM_END}\n{IM_START}assistant\n"
    assert loaded(text)["input_ids"] == _TOKENIZER.encode(text, add_special_tokens=False).ids
    assert loaded.eos_token == IM_END
