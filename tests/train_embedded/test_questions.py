"""What is evaluated: questions with one answer each, the same for every backend, and a card that tells what was found."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from tools.train_embedded.card import card
from tools.train_embedded.checkpoint import load_folder, write_folder
from tools.train_embedded.export import write_checksums
from tools.train_embedded.model import TrainedModel
from tools.train_embedded.questions import Asked, held_out, shares
from tools.train_embedded.recipe import architecture
from tools.train_embedded.served import compare
from tools.train_embedded.tokenizer import train_tokenizer

EVALUATION = {
    "recall": {"32": 0.99, "1500": 0.815},
    "words": 0.9,
    "sums": 0.8,
    "mtp_acceptance": 0.7,
    "perplexity_answers": 1.2,
    "perplexity_prose": 2.0,
}
LOG: list[dict[str, Any]] = [
    {"step": 20, "tokens": 72_000, "tokens_per_s": 20, "loss recall": 5.0},
    {"step": 40, "tokens": 144_000, "tokens_per_s": 40, "loss recall": 1.25},
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(400, seed=0, documents=60)


def test_a_question_is_asked_once_and_its_answer_stands_in_its_prompt(tokenizer: Tokenizer) -> None:
    asked = held_out(tokenizer, 12, (32, 128))
    assert asked == held_out(tokenizer, 12, (32, 128))
    assert {question.group for question in asked} == {"recall 32", "recall 128", "words", "sums"}
    for question in asked:
        assert not set("[]") & set(question.prompt + question.answer)
        if question.group.startswith("recall"):
            unsaid = _words(question.answer) - _words(question.prompt)
            assert unsaid <= {"The", "In", "the", "is", "with", "now", "came", "from", "one", "who", "in", "has"}, question


def _words(text: str) -> set[str]:
    return set(re.findall(r"[A-Za-z]+|[0-9]+", text))


def test_shares_are_by_group() -> None:
    asked = [Asked("a", "", ""), Asked("b", "", ""), Asked("a", "", "")]
    assert shares(asked, [True, False, False]) == {"a": 0.5, "b": 0.0}


def test_a_comparison_counts_right_answers_and_names_differing_ones() -> None:
    asked = [Asked("a", "q1", "yes"), Asked("a", "q2", "yes")]
    found = compare(asked, ["yes", "no"], ["yes", "perhaps"])
    assert (found.cluster, found.transformers) == ({"a": 0.5}, {"a": 0.5})
    assert found.differing == [("q2", "no", "perhaps")]


@pytest.fixture(scope="module")
def folder(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("export")
    torch.manual_seed(0)
    write_folder(TrainedModel(architecture(tokenizer.get_vocab_size())), tokenizer, made)
    return made


def test_a_folder_is_read_as_it_was_written(folder: Path) -> None:
    model, tokenizer = load_folder(folder)
    again = folder / "again"
    write_folder(model, tokenizer, again)
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (again / name).read_bytes() == (folder / name).read_bytes()


def test_the_card_tells_what_was_measured(folder: Path) -> None:
    facts = {"number": 100, "command": "train it", "seed": 20, "lr": 3e-3, "notes": "- A note.\n"}
    text = card(folder, LOG, EVALUATION, facts)
    for said in (
        "| recall at 1500 tokens | 81.5% |",
        "40 steps, 144,000 tokens, 1.5 hours",
        "(40 tokens/s",
        "loss recall 1.25",
    ):
        assert said in text
    assert "{" not in text


def test_checksums_are_what_the_package_verifies(folder: Path) -> None:
    from tandem.model.embedded import verify_checksums

    write_checksums(folder)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen3_5_text"
    verify_checksums(folder)
