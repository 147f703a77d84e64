"""Small random checkpoints that differ in every respect the architecture allows, saved by transformers itself.

transformers initialises norms, decays and time steps to trivial values; here every parameter is random, so that no term
of the network can be left out unnoticed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tandem.cache.budget import PoolSizes
from tandem.cache.memory import CacheMemory
from tandem.config import ModelSource
from tandem.model.batch import ForwardBatch, SequenceChunk
from tandem.model.load import LoadedModel, load_model

BASE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 1024,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "eos_token_id": 96,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "equal heads": {"linear_num_value_heads": 2, "num_key_value_heads": 4},
    "three value heads per key head": {"linear_num_value_heads": 6, "num_attention_heads": 6, "num_hidden_layers": 8},
    "tied": {"tie_word_embeddings": True},
    "uneven layers": {
        "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention", "linear_attention"],
        "num_hidden_layers": 5,
    },
    "only attention": {"layer_types": ["full_attention"] * 2, "num_hidden_layers": 2, "num_key_value_heads": 1},
    "other sizes": {
        "hidden_size": 72,
        "head_dim": 20,
        "linear_key_head_dim": 24,
        "linear_value_head_dim": 40,
        "linear_conv_kernel_dim": 3,
        "rms_norm_eps": 1e-3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    },
    "wider than one gemv": {"intermediate_size": 1100, "num_hidden_layers": 4},
}


@dataclass(frozen=True)
class Variant:
    reference: Any  # transformers' Qwen3_5ForCausalLM, fp32
    folder: Path

    @property
    def loaded(self) -> LoadedModel:
        return load(self.folder)


@cache
def load(folder: Path, dtype: str = "auto") -> LoadedModel:
    return load_model(ModelSource(path=str(folder), dtype=dtype))


def make(folder: Path, overrides: dict[str, Any], **save: Any) -> Variant:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(7)
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**(BASE | overrides))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_random(name, parameter.shape))
    model.tie_weights()
    model.save_pretrained(folder, **save)
    return Variant(model, folder)


def _random(name: str, shape: torch.Size) -> torch.Tensor:
    if name.endswith("A_log"):
        return torch.empty(shape).uniform_(0.02, 2.0).log()
    if name.endswith("linear_attn.norm.weight"):
        return 1 + 0.2 * torch.randn(shape)
    if name.endswith(("norm.weight", "dt_bias")):
        return 0.3 * torch.randn(shape)
    if name.endswith("conv1d.weight"):
        return 0.5 * torch.randn(shape)
    if name.endswith(("embed_tokens.weight", "lm_head.weight")):
        return 0.5 * torch.randn(shape)
    return torch.randn(shape) / math.sqrt(shape[-1])


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (safe_open is no mapping)


def rewrite(source: Path, target: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any] | None = None) -> Path:
    """A copy of a checkpoint with other tensors, and another config.json when given."""
    target.mkdir()
    save_file(tensors, target / "model.safetensors")
    text = (source / "config.json").read_text() if config is None else json.dumps(config)
    (target / "config.json").write_text(text)
    return target


def multimodal(source: Path, target: Path) -> Path:
    """The same weights as a `Qwen3_5ForConditionalGeneration` stores them, with a vision tower and a prediction layer."""
    tensors = {n.replace("model.", "model.language_model.", 1): t for n, t in tensors_of(source).items()}
    tensors |= {
        "model.visual.patch_embed.proj.weight": torch.ones(4, 3),
        "mtp.fc.weight": torch.ones(2, 2, dtype=torch.bfloat16),
    }
    text = json.loads((source / "config.json").read_text())
    config = {"model_type": "qwen3_5", "text_config": text, "vision_config": {"model_type": "qwen3_5_vision"}}
    return rewrite(source, target, tensors, config)


class Runner:
    """One sequence over a memory that starts full of NaN: whatever is read before it was written shows."""

    def __init__(self, loaded: LoadedModel, block_size: int = 16, num_blocks: int = 70) -> None:
        self.model = loaded.model
        self.block_size = block_size
        self.memory = CacheMemory.allocate(self.model.cache_specs(block_size), PoolSizes(num_blocks, 3))
        for tensors in (self.memory.kv, self.memory.conv, self.memory.recurrent):
            for tensor in tensors.values():
                tensor.fill_(math.nan)

    def forward(self, *chunks: SequenceChunk, give_way: Callable[[], None] | None = None) -> torch.Tensor:
        """Hidden states of a step over sequences of whoever asks."""
        return self.model.forward(ForwardBatch.build(chunks, self.block_size), self.memory, give_way=give_way)

    def logits(self, tokens: list[int], split: int, slot: int = 1) -> torch.Tensor:
        """Logits of every position, absorbed `split` tokens at a time, in blocks that lie in falling order."""
        block_size = self.memory.specs.block_size_tokens
        blocks = list(range(self.memory.sizes.num_blocks - 1, -1, -1))
        parts = []
        for start in range(0, len(tokens), split):
            chunk = SequenceChunk(tokens[start : start + split], start, blocks, slot)
            hidden = self.model.forward(ForwardBatch.build([chunk], block_size), self.memory)
            parts.append(self.model.logits(hidden))
        return torch.cat(parts)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got - want).norm() / want.norm()).item()
