"""The trained architecture in plain torch: Gated DeltaNet and gated attention, with a multi-token-prediction layer.

Parameter names are those of the Hugging Face checkpoint (`model.…`, `mtp.…`), so the state dict is the checkpoint. Master
weights and the residual stream are fp32; matrix products take `compute_dtype`; the delta rule is fp32 throughout.

Shape letters: B batch, T time, D hidden, H heads, X head width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tools.train_embedded.delta_rule import gated_delta_rule

__all__ = ["TrainedModel", "rope_tables"]


class _RMSNorm(nn.Module):
    """x / rms(x) * (1 + weight)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * (1.0 + self.weight)


class _GatedRMSNorm(nn.Module):
    """x / rms(x) * weight * silu(gate)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return x * self.weight * functional.silu(gate.float())


class _Linear(nn.Linear):
    """A matrix product in `compute_dtype`, without bias."""

    compute_dtype = torch.bfloat16

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)
        nn.init.normal_(self.weight, std=in_features**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x.to(self.compute_dtype), self.weight.to(self.compute_dtype))


class _DeltaNet(nn.Module):
    """One Gated DeltaNet mixer over [B, T, D]; T is a multiple of the chunk."""

    def __init__(self, config: Mapping[str, Any], chunk: int) -> None:
        super().__init__()
        self.key_heads, self.key_width = config["linear_num_key_heads"], config["linear_key_head_dim"]
        self.value_heads, self.value_width = config["linear_num_value_heads"], config["linear_value_head_dim"]
        self.chunk = chunk
        keys, values, hidden = self.key_heads * self.key_width, self.value_heads * self.value_width, config["hidden_size"]
        channels = 2 * keys + values
        self.in_proj_qkv = _Linear(hidden, channels)
        self.in_proj_z = _Linear(hidden, values)
        self.in_proj_b = _Linear(hidden, self.value_heads)
        self.in_proj_a = _Linear(hidden, self.value_heads)
        self.conv1d = nn.Module()
        self.conv1d.weight = nn.Parameter(torch.randn(channels, 1, config["linear_conv_kernel_dim"]) * 0.3)
        # Half-lives of the state from a few to several hundred tokens at initialisation.
        step = torch.exp(torch.linspace(-6.5, -2.5, self.value_heads))
        self.dt_bias = nn.Parameter(torch.log(torch.expm1(step)))
        self.A_log = nn.Parameter(torch.zeros(self.value_heads))
        self.norm = _GatedRMSNorm(self.value_width, config["rms_norm_eps"])
        self.out_proj = _Linear(values, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, _ = x.shape
        mixed = functional.pad(self.in_proj_qkv(x).float(), (0, 0, self.conv1d.weight.shape[-1] - 1, 0))
        taps = self.conv1d.weight[:, 0].unbind(-1)
        mixed = functional.silu(sum(mixed[:, i : i + time] * tap for i, tap in enumerate(taps)))
        keys = self.key_heads * self.key_width
        q, k, v = mixed.split([keys, keys, self.value_heads * self.value_width], -1)
        g = -self.A_log.exp() * functional.softplus(self.in_proj_a(x).float() + self.dt_bias)
        out = gated_delta_rule(
            q.view(batch, time, self.key_heads, self.key_width),
            k.view(batch, time, self.key_heads, self.key_width),
            v.view(batch, time, self.value_heads, self.value_width),
            g,
            self.in_proj_b(x).float().sigmoid(),
            self.chunk,
        )
        out = self.norm(out, self.in_proj_z(x).view(batch, time, self.value_heads, self.value_width))
        return self.out_proj(out.flatten(2))


class _Attention(nn.Module):
    """Grouped causal attention with a sigmoid gate on its output and a rotation of each head's first dimensions."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = (
            config["num_attention_heads"],
            config["num_key_value_heads"],
            config["head_dim"],
        )
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.q_proj = _Linear(hidden, self.heads * self.width * 2)
        self.k_proj = _Linear(hidden, self.kv_heads * self.width)
        self.v_proj = _Linear(hidden, self.kv_heads * self.width)
        self.o_proj = _Linear(self.heads * self.width, hidden)
        self.q_norm, self.k_norm = _RMSNorm(self.width, eps), _RMSNorm(self.width, eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, time, _ = x.shape
        q, gate = self.q_proj(x).view(batch, time, self.heads, 2 * self.width).chunk(2, -1)
        k = self.k_proj(x).view(batch, time, self.kv_heads, self.width)
        v = self.v_proj(x).view(batch, time, self.kv_heads, self.width)
        q = _rotate(self.q_norm(q), cos, sin).to(v.dtype).transpose(1, 2)
        k = _rotate(self.k_norm(k), cos, sin).to(v.dtype).transpose(1, 2)
        k = k.repeat_interleave(self.heads // self.kv_heads, 1)
        v = v.transpose(1, 2).repeat_interleave(self.heads // self.kv_heads, 1)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self.o_proj((out * torch.sigmoid(gate)).flatten(2))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first dimensions of x [B, T, H, X]; cos and sin are [T, 1, rotated / 2]."""
    half = cos.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def rope_tables(config: Mapping[str, Any], time: int) -> tuple[Tensor, Tensor]:
    """cos and sin [time, 1, rotated / 2] for positions 0, 1, …"""
    rope = config["rope_parameters"]
    rotated = int(config["head_dim"] * rope["partial_rotary_factor"])
    frequency = 1.0 / (rope["rope_theta"] ** (torch.arange(0, rotated, 2, dtype=torch.float32) / rotated))
    angle = torch.arange(time, dtype=torch.float32)[:, None, None] * frequency
    return angle.cos(), angle.sin()


class _MLP(nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = _Linear(hidden, intermediate)
        self.up_proj = _Linear(hidden, intermediate)
        self.down_proj = _Linear(intermediate, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    def __init__(self, config: Mapping[str, Any], kind: str, chunk: int) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.input_layernorm = _RMSNorm(hidden, eps)
        self.post_attention_layernorm = _RMSNorm(hidden, eps)
        self.mlp = _MLP(hidden, config["intermediate_size"])
        self.linear_attn = _DeltaNet(config, chunk) if kind == "linear_attention" else None
        self.self_attn = _Attention(config) if kind == "full_attention" else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.input_layernorm(x)
        mixed = self.linear_attn(normed) if self.linear_attn is not None else self.self_attn(normed, cos, sin)
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x))


class _Stack(nn.Module):
    def __init__(self, config: Mapping[str, Any], chunk: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        nn.init.normal_(self.embed_tokens.weight, std=config["hidden_size"] ** -0.5)
        self.layers = nn.ModuleList(_Layer(config, kind, chunk) for kind in config["layer_types"])
        self.norm = _RMSNorm(config["hidden_size"], config["rms_norm_eps"])


class _MultiTokenPrediction(nn.Module):
    """Hidden states for token t + 2 from the target's final hidden at t and the embedding of token t + 1."""

    def __init__(self, config: Mapping[str, Any], chunk: int) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.fc = _Linear(2 * hidden, hidden)
        self.pre_fc_norm_embedding = _RMSNorm(hidden, eps)
        self.pre_fc_norm_hidden = _RMSNorm(hidden, eps)
        self.layers = nn.ModuleList([_Layer(config, "full_attention", chunk)])
        self.norm = _RMSNorm(hidden, eps)

    def forward(self, hidden: Tensor, embedded: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        joined = torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)], -1)
        return self.norm(self.layers[0](self.fc(joined).float(), cos, sin))


class TrainedModel(nn.Module):
    """config: the keys of config.json. chunk: the delta rule's chunk; sequence lengths are multiples of it."""

    def __init__(self, config: Mapping[str, Any], chunk: int = 32) -> None:
        super().__init__()
        self.config = config
        self.model = _Stack(config, chunk)
        self.mtp = _MultiTokenPrediction(config, chunk)

    def hidden(self, tokens_BT: Tensor, with_mtp: bool = True) -> tuple[Tensor, Tensor | None]:
        """Hidden states after the final norm [B, T, D], and the MTP layer's: at t for token t + 2 (the last is unused)."""
        cos, sin = rope_tables(self.config, tokens_BT.shape[1])
        embedded = self.model.embed_tokens(tokens_BT)
        x = embedded
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        hidden = self.model.norm(x)
        return hidden, self.mtp(hidden, embedded.roll(-1, 1), cos, sin) if with_mtp else None

    def logits(self, hidden: Tensor) -> Tensor:
        dtype = _Linear.compute_dtype
        return functional.linear(hidden.to(dtype), self.model.embed_tokens.weight.to(dtype)).float()

    def compile_layers(self) -> None:
        """Compile each layer, for any batch and length; equal layers share their compiled code."""
        for layer in [*self.model.layers, self.mtp]:
            layer.compile(dynamic=True)

    @staticmethod
    def set_compute_dtype(dtype: torch.dtype) -> None:
        _Linear.compute_dtype = dtype
