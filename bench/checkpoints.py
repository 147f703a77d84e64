"""Checkpoints that benchmarks share: random weights, the same bytes on every machine.

    python -m bench.checkpoints [FOLDER]

makes the 121 M one (in the cache folder unless another is given) and prints where it lies.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from tandem.environment import cache_home
from tandem.model.random_checkpoint import make_once, write_checkpoint

__all__ = ["CONFIG_121M", "bench_checkpoint", "make_121m"]

CONFIG_121M: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "dtype": "bfloat16",
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 2560,
    "num_hidden_layers": 12,
    "full_attention_interval": 4,
    "hidden_act": "silu",
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 12,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25},
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "eos_token_id": 256,
}
"""121.5 M parameters in 12 layers (9 DeltaNet, 3 attention), bf16: a step reads all of them."""


def make_121m(folder: Path) -> Path:
    """Make the 121 M checkpoint in `folder`, unless it is there: seconds, 243 MB."""

    def write(made: Path) -> None:
        # Small embeddings, so that the layers decide the next token rather than the last one.
        write_checkpoint(made, CONFIG_121M, seed=121, dtype=torch.bfloat16, embedding_deviation=0.02)

    return make_once(folder, write)


def bench_checkpoint() -> Path:
    """The 121 M checkpoint in tandem's cache folder."""
    return make_121m(cache_home() / "bench-121m-v1")


if __name__ == "__main__":
    print(make_121m(Path(sys.argv[1])) if len(sys.argv) > 1 else bench_checkpoint())
