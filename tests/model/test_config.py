from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.errors import CheckpointError
from tandem.model.config import LayerType, ModelConfig

MINIMAL: dict[str, Any] = {"model_type": "qwen3_5_text"}


def read(folder: Path, config: object, generation: object = None) -> ModelConfig:
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return ModelConfig.from_folder(folder)


def test_absent_keys_take_the_defaults_of_transformers(tmp_path: Path) -> None:
    from transformers import Qwen3_5TextConfig

    config, theirs = read(tmp_path, MINIMAL), Qwen3_5TextConfig()
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (248320, 4096, 12288)
    assert [kind.value for kind in config.layer_types] == theirs.layer_types
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (16, 4, theirs.head_dim)
    assert (config.linear_num_key_heads, config.linear_num_value_heads) == (16, theirs.linear_num_value_heads)
    assert (config.linear_key_head_dim, config.linear_value_head_dim, config.conv_width) == (128, 128, 4)
    assert config.rope_theta == theirs.rope_parameters["rope_theta"]
    assert config.rotary_dim == theirs.head_dim * theirs.rope_parameters["partial_rotary_factor"]
    assert (config.rms_norm_eps, config.tied_embeddings, config.max_position_embeddings) == (1e-6, False, 32768)
    assert config.eos_token_ids == ()


def test_the_27b_config_gives_its_known_sizes(tmp_path: Path) -> None:
    text = {
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 64,
        "full_attention_interval": 4,
        "hidden_size": 5120,
        "num_attention_heads": 24,
        "linear_num_value_heads": 48,
        "rope_parameters": {
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
            "rope_type": "default",
        },
        "eos_token_id": 248044,
    }
    top = {"model_type": "qwen3_5", "text_config": text, "vision_config": {}, "tie_word_embeddings": False}
    config = read(tmp_path, top, {"eos_token_id": [248046, 248044]})
    assert config.num_layers == 64
    assert [i for i, kind in enumerate(config.layer_types) if kind is LayerType.FULL][:3] == [3, 7, 11]
    assert (config.conv_channels, config.key_channels, config.value_channels) == (10240, 2048, 6144)
    assert (config.rotary_dim, config.rope_theta) == (64, 1e7)
    assert config.eos_token_ids == (248044, 248046)


def test_layer_types_override_the_interval(tmp_path: Path) -> None:
    named = ["full_attention", "linear_attention"]
    config = read(tmp_path, MINIMAL | {"num_hidden_layers": 2, "full_attention_interval": 2, "layer_types": named})
    assert config.layer_types == (LayerType.FULL, LayerType.LINEAR)


def test_older_rope_keys_at_the_top_are_read(tmp_path: Path) -> None:
    config = read(tmp_path, MINIMAL | {"rope_theta": 5e5, "partial_rotary_factor": 0.5, "head_dim": 64})
    assert (config.rope_theta, config.rotary_dim) == (5e5, 32)


@pytest.mark.parametrize("level", ["top", "text"])
def test_tying_may_be_declared_on_either_level(level: str, tmp_path: Path) -> None:
    text = MINIMAL | ({"tie_word_embeddings": True} if level == "text" else {})
    top = {"model_type": "qwen3_5", "text_config": text} | ({"tie_word_embeddings": True} if level == "top" else {})
    assert read(tmp_path, top).tied_embeddings


WRONG: list[tuple[object, str]] = [
    ("{", "not valid JSON"),
    ("[" * 100_000, "not valid JSON"),
    ("[]", "JSON object"),
    ({}, "model_type None"),
    ({"model_type": "qwen3_5_moe"}, "qwen3_5_moe"),
    ({"model_type": "llama"}, "llama"),
    ({"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_moe_text"}}, "qwen3_5_moe_text"),
    ({"model_type": "qwen3_5", "text_config": 3}, "text_config"),
    (MINIMAL | {"hidden_act": "gelu"}, "gelu"),
    (MINIMAL | {"attention_bias": True}, "attention_bias"),
    (MINIMAL | {"attn_output_gate": False}, "attn_output_gate"),
    (MINIMAL | {"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype"),
    (MINIMAL | {"quantization_config": {"quant_method": "fp8"}}, "fp8"),
    (MINIMAL | {"hidden_size": 0}, "hidden_size"),
    (MINIMAL | {"hidden_size": "64"}, "hidden_size"),
    (MINIMAL | {"hidden_size": True}, "hidden_size"),
    (MINIMAL | {"vocab_size": 1 << 40}, "vocab_size"),
    (MINIMAL | {"num_hidden_layers": 10**9}, "num_hidden_layers"),
    (MINIMAL | {"layer_types": ["sliding_attention"]}, "layer_types"),
    (MINIMAL | {"layer_types": [["full_attention"]]}, "layer_types"),
    (MINIMAL | {"layer_types": ["full_attention"], "num_hidden_layers": 2}, "1 entries"),
    (MINIMAL | {"num_attention_heads": 6}, "num_key_value_heads"),
    (MINIMAL | {"linear_num_value_heads": 20}, "linear_num_key_heads"),
    (MINIMAL | {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
    (MINIMAL | {"rms_norm_eps": -1}, "rms_norm_eps"),
    (MINIMAL | {"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    (MINIMAL | {"rope_parameters": {"rope_type": "yarn"}}, "yarn"),
    (MINIMAL | {"rope_parameters": 7}, "rope_parameters"),
    (MINIMAL | {"rope_parameters": {"partial_rotary_factor": 2.0}}, "partial_rotary_factor"),
    (MINIMAL | {"rope_parameters": {"rope_theta": 0}}, "rope_theta"),
    (MINIMAL | {"eos_token_id": "x"}, "eos_token_id"),
    (MINIMAL | {"eos_token_id": 248320}, "eos_token_id"),
    (MINIMAL | {"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
]


@pytest.mark.parametrize(("config", "named"), WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_what_cannot_be_served_is_refused_in_one_sentence_that_names_it(config: object, named: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=named) as caught:
        read(tmp_path, config)
    assert "\n" not in str(caught.value)


def test_a_missing_or_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        ModelConfig.from_folder(tmp_path)


def test_a_malformed_generation_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        read(tmp_path, MINIMAL, ["not", "an", "object"])
