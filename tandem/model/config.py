"""The text architecture of a checkpoint, read from its config.json: every size comes from the file.

Keys that the file leaves out take the defaults of transformers' `Qwen3_5TextConfig`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from tandem.errors import CheckpointError

__all__ = ["LayerType", "ModelConfig"]

_TOP_TYPES = ("qwen3_5", "qwen3_5_text")


class LayerType(Enum):
    LINEAR = "linear_attention"
    FULL = "full_attention"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and constants of one hybrid model.

    layer_types: one entry per layer. rotary_dim: leading dimensions of each head that are rotated. eos_token_ids: what
    config.json and generation_config.json name together, ascending; may be empty. tied_embeddings: the output
    projection is the embedding unless the checkpoint stores another.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_types: tuple[LayerType, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    conv_width: int
    rms_norm_eps: float
    tied_embeddings: bool
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...] = ()

    @property
    def num_layers(self) -> int:
        return len(self.layer_types)

    @property
    def key_channels(self) -> int:
        """Channels of all query heads of a DeltaNet layer, and of all key heads."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_channels(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_channels(self) -> int:
        return 2 * self.key_channels + self.value_channels

    @classmethod
    def from_folder(cls, path: str | Path) -> ModelConfig:
        """Read `config.json` (text part at the top or under `text_config`) and, where present, `generation_config.json`.

        Raises:
            CheckpointError: a file is missing or malformed, a value makes no sense, or the model is of another kind.
        """
        folder = Path(path)
        top = _read_object(folder / "config.json")
        generation_path = folder / "generation_config.json"
        generation = _read_object(generation_path) if generation_path.is_file() else {}
        return _from_mappings(top, generation, str(folder / "config.json"))


def _read_object(path: Path) -> Mapping[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist: give the folder of a Hugging Face checkpoint") from error
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(data).__name__}")
    return data


def _from_mappings(top: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> ModelConfig:
    text = top.get("text_config", top)
    if not isinstance(text, Mapping):
        raise CheckpointError(f"{where}: text_config must be an object, not {type(text).__name__}")
    fields = _Fields(text, where)
    _refuse_unsupported(top, fields)
    layer_types = _layer_types(fields)
    rope_theta, rotary_dim = _rope(fields)
    config = ModelConfig(
        vocab_size=fields.positive("vocab_size", 248320),
        hidden_size=fields.positive("hidden_size", 4096),
        intermediate_size=fields.positive("intermediate_size", 12288),
        layer_types=layer_types,
        num_heads=fields.positive("num_attention_heads", 16),
        num_kv_heads=fields.positive("num_key_value_heads", 4),
        head_dim=fields.positive("head_dim", 256),
        rotary_dim=rotary_dim,
        rope_theta=rope_theta,
        linear_num_key_heads=fields.positive("linear_num_key_heads", 16),
        linear_num_value_heads=fields.positive("linear_num_value_heads", 32),
        linear_key_head_dim=fields.positive("linear_key_head_dim", 128),
        linear_value_head_dim=fields.positive("linear_value_head_dim", 128),
        conv_width=fields.positive("linear_conv_kernel_dim", 4),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        tied_embeddings=fields.flag("tie_word_embeddings", False) or _Fields(top, where).flag("tie_word_embeddings", False),
        max_position_embeddings=fields.positive("max_position_embeddings", 32768),
        eos_token_ids=_eos_token_ids(top, text, generation, where),
    )
    _check_heads(config, where)
    return config


@dataclass(frozen=True, slots=True)
class _Fields:
    """Typed access to one JSON object; `where` names it in errors."""

    values: Mapping[str, Any]
    where: str

    def get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        return default if value is None else value

    def positive(self, key: str, default: int) -> int:
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 31:
            raise CheckpointError(f"{self.where}: {key} must be a positive integer, not {value!r}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e30:
            raise CheckpointError(f"{self.where}: {key} must be a positive number, not {value!r}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.where}: {key} must be true or false, not {value!r}")
        return value


def _refuse_unsupported(top: Mapping[str, Any], fields: _Fields) -> None:
    for values, allowed in ((top, _TOP_TYPES), (fields.values, _TOP_TYPES)):
        model_type = values.get("model_type")
        if model_type not in allowed:
            raise CheckpointError(
                f"{fields.where}: model_type {model_type!r} is not supported: tandem serves {' and '.join(_TOP_TYPES)}"
            )
    if (act := fields.get("hidden_act", "silu")) != "silu":
        raise CheckpointError(f"{fields.where}: hidden_act {act!r} is not supported: only silu is")
    if not fields.flag("attn_output_gate", True):
        raise CheckpointError(f"{fields.where}: attn_output_gate false is not supported")
    if fields.flag("attention_bias", False):
        raise CheckpointError(f"{fields.where}: attention_bias true is not supported")
    for values in (top, fields.values):
        if quantization := values.get("quantization_config"):
            method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
            raise CheckpointError(f"{fields.where}: quantised weights ({method}) are not supported: use bf16, fp16 or fp32")
    if (ssm_dtype := fields.get("mamba_ssm_dtype", "float32")) != "float32":
        raise CheckpointError(f"{fields.where}: mamba_ssm_dtype {ssm_dtype!r} is not supported: only float32 is")


def _layer_types(fields: _Fields) -> tuple[LayerType, ...]:
    # Bounded here, since a list of this length is built from it.
    num_layers = fields.positive("num_hidden_layers", 32)
    if num_layers > 4096:
        raise CheckpointError(f"{fields.where}: num_hidden_layers {num_layers} is more than 4096")
    named = fields.get("layer_types", None)
    if named is None:
        interval = fields.positive("full_attention_interval", 4)
        return tuple(LayerType.LINEAR if (i + 1) % interval else LayerType.FULL for i in range(num_layers))
    known = {kind.value: kind for kind in LayerType}
    if not isinstance(named, list) or any(not isinstance(n, str) or n not in known for n in named):
        raise CheckpointError(f"{fields.where}: layer_types must be a list of {' and '.join(known)}")
    if len(named) != num_layers:
        raise CheckpointError(f"{fields.where}: layer_types has {len(named)} entries for num_hidden_layers {num_layers}")
    return tuple(known[n] for n in named)


def _rope(fields: _Fields) -> tuple[float, int]:
    """Base and rotated dimensions. Text positions are one-dimensional, so interleaved mrope is the plain rotation."""
    rope = fields.get("rope_parameters", fields.get("rope_scaling", {}))
    if not isinstance(rope, Mapping):
        raise CheckpointError(f"{fields.where}: rope_parameters must be an object, not {type(rope).__name__}")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "mrope"):
        raise CheckpointError(f"{fields.where}: rope_type {kind!r} is not supported: only default is")
    inner = _Fields(rope, f"{fields.where}: rope_parameters")
    theta = inner.number("rope_theta", fields.number("rope_theta", 10000.0))
    factor = inner.number("partial_rotary_factor", fields.number("partial_rotary_factor", 0.25))
    head_dim = fields.positive("head_dim", 256)
    rotary_dim = int(head_dim * factor)
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_dim:
        raise CheckpointError(
            f"{fields.where}: partial_rotary_factor {factor} of head_dim {head_dim} must give an even number of dimensions, "
            f"2 to head_dim, not {rotary_dim}"
        )
    return theta, rotary_dim


def _eos_token_ids(
    top: Mapping[str, Any], text: Mapping[str, Any], generation: Mapping[str, Any], where: str
) -> tuple[int, ...]:
    found: set[int] = set()
    for values in (top, text, generation):
        value = values.get("eos_token_id")
        for token in [] if value is None else value if isinstance(value, list) else [value]:
            if not isinstance(token, int) or isinstance(token, bool) or token < 0:
                raise CheckpointError(f"{where}: eos_token_id must be token ids, not {value!r}")
            found.add(token)
    return tuple(sorted(found))


def _check_heads(config: ModelConfig, where: str) -> None:
    if config.num_heads % config.num_kv_heads:
        raise CheckpointError(
            f"{where}: num_attention_heads {config.num_heads} is no multiple of num_key_value_heads {config.num_kv_heads}"
        )
    if config.linear_num_value_heads % config.linear_num_key_heads:
        raise CheckpointError(
            f"{where}: linear_num_value_heads {config.linear_num_value_heads} is no multiple of "
            f"linear_num_key_heads {config.linear_num_key_heads}"
        )
    if config.conv_width < 2:
        raise CheckpointError(f"{where}: linear_conv_kernel_dim must be at least 2, not {config.conv_width}")
    if any(token >= config.vocab_size for token in config.eos_token_ids):
        raise CheckpointError(f"{where}: an eos_token_id of {config.eos_token_ids} is outside vocab_size {config.vocab_size}")
