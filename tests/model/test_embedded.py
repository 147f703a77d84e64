"""The checkpoint that ships: whole, small, quick to load, and the same for transformers as for us."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.config import ModelSource
from tandem.errors import CheckpointError
from tandem.model.embedded import EMBEDDED_NAME, embedded_checkpoint, verify_checksums
from tandem.model.load import LoadedModel, load_model
from tandem.tokenizer import Tokenizer
from tests.model.variants import Runner, relative_error

MOST_BYTES = 12 << 20
MOST_LOAD_S = 2.0
CHAT = [{"role": "system", "content": "S"}, {"role": "user", "content": "hi"}]
CHAT_TEXT = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(ModelSource())


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(embedded_checkpoint())


def test_an_empty_source_is_the_embedded_model_in_fp32(loaded: LoadedModel) -> None:
    assert (loaded.name, loaded.folder, loaded.model.dtype) == (EMBEDDED_NAME, embedded_checkpoint(), "float32")
    assert load_model(ModelSource(dtype="bfloat16")).model.dtype == "bfloat16"


def test_it_is_small_and_loads_at_once() -> None:
    assert sum(file.stat().st_size for file in embedded_checkpoint().iterdir()) <= MOST_BYTES
    started_s = time.perf_counter()
    load_model(ModelSource())
    assert time.perf_counter() - started_s < MOST_LOAD_S


def test_every_file_has_a_checksum(tmp_path: Path) -> None:
    folder = embedded_checkpoint()
    listed = {line.split("  ")[1] for line in (folder / "SHA256SUMS").read_text().splitlines()}
    assert listed == {file.name for file in folder.iterdir()} - {"SHA256SUMS"}


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_one_changed_byte_is_refused_by_the_files_name(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(embedded_checkpoint(), folder)
    verify_checksums(folder)
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{name} is not the file that tandem shipped: install tandem again"):
        verify_checksums(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "SHA256SUMS"])
def test_a_missing_file_is_refused_by_its_name(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(embedded_checkpoint(), folder)
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=f"not whole: .*{name}"):
        verify_checksums(folder)


def test_a_changed_checkpoint_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(embedded_checkpoint(), folder)
    with (folder / "model.safetensors").open("ab") as weights:
        weights.write(b"\0")
    monkeypatch.setattr("tandem.model.embedded._FOLDER", folder)
    with pytest.raises(CheckpointError, match="is not the file that tandem shipped"):
        load_model(ModelSource())


def test_transformers_computes_the_same_logits(loaded: LoadedModel) -> None:
    from transformers import Qwen3_5ForCausalLM

    reference = Qwen3_5ForCausalLM.from_pretrained(loaded.folder, dtype=torch.float32).eval()
    tokens = torch.randint(0, loaded.config.vocab_size, (150,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.no_grad():
        want = reference(torch.tensor([tokens])).logits[0]
    assert relative_error(Runner(loaded).logits(tokens, split=64), want) < 1e-5


@given(st.text())
def test_the_tokenizer_round_trips_any_text(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=False) == text


def test_the_chat_template_is_chatml(tokenizer: Any, loaded: LoadedModel) -> None:
    assert tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True) == CHAT_TEXT
    assert Tokenizer.load(loaded.folder).encode(CHAT_TEXT) == tokenizer(CHAT_TEXT).input_ids


def test_an_answer_ends_with_a_token_that_the_config_names(tokenizer: Any, loaded: LoadedModel) -> None:
    assert tokenizer.eos_token_id in loaded.config.eos_token_ids
