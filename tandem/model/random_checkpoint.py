"""A small random checkpoint of the architecture, made on first use, the same bytes on every machine: for tests and benchmarks.

Its text means nothing, its tokens are reproducible, its greedy choices are far apart, and it never ends an answer by itself.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tandem.environment import cache_home
from tandem.errors import CheckpointError
from tandem.model.config import ModelConfig
from tandem.model.tensors import HEAD, expected_tensors

__all__ = ["make_once", "random_checkpoint", "write_checkpoint"]

# Part of the folder's name: raise it with any change of what is written.
_VERSION = 1
_NUM_BYTES = 256
_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "dtype": "float32",
    "vocab_size": _NUM_BYTES + len(_SPECIAL_TOKENS),
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "full_attention_interval": 4,
    "hidden_act": "silu",
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "attention_bias": False,
    "attn_output_gate": True,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "mamba_ssm_dtype": "float32",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25},
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "eos_token_id": _NUM_BYTES,
}


def random_checkpoint() -> Path:
    """The folder of the random checkpoint, made now if it does not exist. Safe when several processes ask at once.

    Raises:
        CheckpointError: the cache folder cannot be written.
    """
    return make_once(cache_home() / f"tandem-random-v{_VERSION}", _write)


def make_once(folder: Path, write: Callable[[Path], None]) -> Path:
    """`folder`, filled by `write(temporary_folder)` and renamed into place, so that it exists whole or not at all.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            write(made)
            made.chmod(0o755)
            os.rename(made, folder)
        except OSError:
            # Another process was first: its folder has the same content.
            if not folder.is_dir():
                raise
        finally:
            shutil.rmtree(made, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(f"cannot write {folder}: {error}; set TANDEM_HOME to a writable folder") from error
    return folder


def _write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer (token id = byte, then the special tokens) with a ChatML template, and generation_config.json."""
    # GPT-2's printable stand-ins for the 256 bytes: those that print stand for themselves, the others follow from U+0100.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(_NUM_BYTES) if byte not in set(printable)]
    symbol = {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab={symbol[byte]: byte for byte in range(_NUM_BYTES)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "model_max_length": 8192,
            "clean_up_tokenization_spaces": False,
            "chat_template": _CHAT_TEMPLATE,
        },
    )
    eos = [_NUM_BYTES + _SPECIAL_TOKENS.index("<|im_end|>"), _NUM_BYTES]
    _write_json(folder / "generation_config.json", {"eos_token_id": eos, "pad_token_id": _NUM_BYTES, "do_sample": False})


def _write(folder: Path) -> None:
    write_checkpoint(folder, _CONFIG, seed=20_250_101)


def write_checkpoint(
    folder: Path,
    config_json: Mapping[str, Any],
    seed: int,
    dtype: torch.dtype = torch.float32,
    embedding_deviation: float = 1.0,
) -> None:
    """Fill `folder` with a random checkpoint of this config.json, and with the byte tokenizer, which covers the first 259
    token ids. Equal arguments give equal bytes."""
    _write_json(folder / "config.json", config_json)
    _write_tokenizer(folder)
    config = ModelConfig.from_folder(folder)
    random = _Uniform(seed)
    shapes = {f"model.{name}": shape for name, shape in expected_tensors(config).items()}
    if not config.tied_embeddings:
        shapes[HEAD] = (config.vocab_size, config.hidden_size)
    tensors = {
        name: torch.from_numpy(_values(name, shape, random, embedding_deviation)).to(dtype) for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)


def _values(name: str, shape: tuple[int, ...], random: _Uniform, embedding_deviation: float) -> npt.NDArray[np.float32]:
    """Scales that keep every term of the network at work, and greedy choices far apart."""
    if name == HEAD:
        # Printable bytes compete with a logit deviation of about 4; other tokens, ends included, never win.
        head = random.around(0.0, 0.02, shape)
        head[0x20:0x7F] *= 12.5
        head[_NUM_BYTES:] = 0.0
        return head
    if name.endswith("A_log"):
        return np.log(random.between(0.02, 1.0, shape)).astype(np.float32).round(3)
    if name.endswith("dt_bias"):
        return random.around(0.0, 1.0, shape)
    if name.endswith("linear_attn.norm.weight"):
        return random.around(1.0, 0.1, shape)
    if name.endswith("norm.weight"):
        return random.around(0.0, 0.1, shape)
    if name.endswith("conv1d.weight"):
        return random.around(0.0, 0.5, shape)
    if name.endswith("embed_tokens.weight"):
        return random.around(0.0, embedding_deviation, shape)
    return random.around(0.0, 1.0 / math.sqrt(shape[-1]), shape)


class _Uniform:
    """Uniform numbers from PCG64's raw stream, which numpy keeps stable: the same bits on every machine and version."""

    def __init__(self, seed: int) -> None:
        self._bits = np.random.PCG64(seed)

    def between(self, low: float, high: float, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
        raw = self._bits.random_raw(math.prod(shape))
        unit = (raw >> np.uint64(40)).astype(np.float64) * 2.0**-24
        return (low + (high - low) * unit).astype(np.float32).reshape(shape)

    def around(self, centre: float, deviation: float, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
        reach = deviation * math.sqrt(3.0)
        return self.between(centre - reach, centre + reach, shape)


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
