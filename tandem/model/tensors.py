"""Names and shapes of every tensor that an architecture needs: what a checkpoint is checked against before it is read."""

from __future__ import annotations

from tandem.model.config import LayerType, ModelConfig

__all__ = ["HEAD", "expected_tensors"]

HEAD = "lm_head.weight"


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes by name, without the checkpoint's prefix; the output projection excepted, which may be tied or not."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (config.vocab_size, hidden), "norm.weight": (hidden,)}
    for index, kind in enumerate(config.layer_types):
        mixer = _attention(config) if kind is LayerType.FULL else _delta_net(config)
        for name, shape in (mixer | _mlp(config)).items():
            shapes[f"layers.{index}.{name}"] = shape
    return shapes


def _mlp(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    return {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }


def _attention(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, dim = config.hidden_size, config.head_dim
    return {
        "self_attn.q_proj.weight": (config.num_heads * 2 * dim, hidden),
        "self_attn.k_proj.weight": (config.num_kv_heads * dim, hidden),
        "self_attn.v_proj.weight": (config.num_kv_heads * dim, hidden),
        "self_attn.o_proj.weight": (hidden, config.num_heads * dim),
        "self_attn.q_norm.weight": (dim,),
        "self_attn.k_norm.weight": (dim,),
    }


def _delta_net(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, heads = config.hidden_size, config.linear_num_value_heads
    return {
        "linear_attn.in_proj_qkv.weight": (config.conv_channels, hidden),
        "linear_attn.in_proj_z.weight": (config.value_channels, hidden),
        "linear_attn.in_proj_b.weight": (heads, hidden),
        "linear_attn.in_proj_a.weight": (heads, hidden),
        "linear_attn.conv1d.weight": (config.conv_channels, 1, config.conv_width),
        "linear_attn.A_log": (heads,),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.norm.weight": (config.linear_value_head_dim,),
        "linear_attn.out_proj.weight": (hidden, config.value_channels),
    }
