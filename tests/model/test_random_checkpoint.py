from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.config import ModelSource
from tandem.errors import CheckpointError
from tandem.model.load import load_model
from tandem.model.random_checkpoint import make_once, random_checkpoint
from tests.model.variants import Runner, Variant, relative_error


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TANDEM_HOME", str(tmp_path_factory.mktemp("home")))
        return random_checkpoint()


@pytest.fixture(scope="module")
def tokenizer(made: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(made)


@pytest.fixture(scope="module")
def reference(made: Path) -> Variant:
    from transformers import Qwen3_5ForCausalLM

    return Variant(Qwen3_5ForCausalLM.from_pretrained(made).eval(), made)


def test_it_is_the_same_model_on_every_machine(made: Path) -> None:
    """A fixed fingerprint: made bytes, architecture and layout cannot change unnoticed, here or elsewhere."""
    assert load_model(ModelSource(path=str(made))).fingerprint == "aba9c8996793bd8a9342c2d2d2918668"


def test_it_serves_a_long_context_and_knows_its_ends(made: Path) -> None:
    loaded = load_model(ModelSource(path=str(made)))
    assert loaded.max_context_tokens == 8192
    assert loaded.config.eos_token_ids == (256, 258)


def test_transformers_computes_the_same_logits(reference: Variant) -> None:
    tokens = torch.randint(0, 256, (150,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.no_grad():
        want = reference.reference(torch.tensor([tokens])).logits[0]
    assert relative_error(Runner(reference.loaded).logits(tokens, split=64), want) < 1e-5


def test_greedy_choices_are_far_apart_and_do_not_end(reference: Variant) -> None:
    tokens = torch.randint(0, 256, (500,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        logits = reference.reference(torch.tensor([tokens])).logits[0]
    top = logits.topk(2).values
    gaps = top[:, 0] - top[:, 1]
    assert gaps.median() > 0.5
    assert (gaps < 1e-3).float().mean() < 0.01
    assert (logits.argmax(-1) < 256).all()


@given(st.text())
def test_the_tokenizer_round_trips_any_text(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_token_ids_are_bytes_and_special_tokens_follow(tokenizer: Any) -> None:
    assert tokenizer("aé<|im_end|>").input_ids == [*"aé".encode(), 258]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (258, 256)


def test_the_chat_template_is_chatml(tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_the_one_who_comes_second_takes_the_firsts_folder(tmp_path: Path) -> None:
    folder = tmp_path / "made"

    def write_while_another_wins(mine: Path) -> None:
        (mine / "file").write_text("mine")
        folder.mkdir()
        (folder / "file").write_text("theirs")

    assert make_once(folder, write_while_another_wins) == folder
    assert (folder / "file").read_text() == "theirs"
    assert os.listdir(tmp_path) == ["made"]


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail(mine: Path) -> None:
        (mine / "file").write_text("half")
        raise OSError("disk full")

    with pytest.raises(CheckpointError, match="disk full"):
        make_once(tmp_path / "made", fail)
    assert not os.listdir(tmp_path)


def test_an_unwritable_cache_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="set TANDEM_HOME"):
        make_once(tmp_path / "file" / "made", lambda folder: None)
