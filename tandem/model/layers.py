"""The two kinds of mixer and the MLP, each as prepared weights and a forward over a ragged batch.

Legend: T tokens, N hidden features, C convolution channels, H query heads, G key/value heads, D their dimension, J key
heads and V value heads of the delta rule with dimensions P and Q. Projections that read the same input are one matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tandem.cache.memory import CacheMemory
from tandem.kernels import stable
from tandem.kernels.api import Kernels
from tandem.model.config import ModelConfig

__all__ = ["AttentionMixer", "DeltaNetMixer", "Mixer", "Mlp", "StepContext", "TakeTensor", "read_norm"]


class TakeTensor(Protocol):
    def __call__(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The named tensor, of exactly this shape, owned by the caller; in the serving dtype unless another is asked for."""
        ...


@dataclass(frozen=True)
class StepContext:
    """What every layer of one step shares. stable_rows: see `Kernels.linear`. give_way: see `HybridModel.forward`; what a layer
    keeps for itself at that moment must be its own, as another step may run meanwhile."""

    plan: Any
    memory: CacheMemory
    cos_TR: torch.Tensor
    sin_TR: torch.Tensor
    stable_rows: bool
    give_way: Callable[[], None]


class Mixer(Protocol):
    def __call__(self, x_TN: torch.Tensor, residual_TN: torch.Tensor, step: StepContext) -> torch.Tensor:
        """Mix over time, updating this layer's caches, and add the residual."""
        ...


def read_norm(take: TakeTensor, name: str, size: int) -> torch.Tensor:
    """The factor of an RMS norm whose stored weight is its distance from one; fp32."""
    return take(name, size, dtype=torch.float32) + 1.0


class AttentionMixer:
    """Grouped-query attention with per-head q/k norms, partial rotation and a sigmoid gate on the output."""

    def __init__(self, config: ModelConfig, index: int, prefix: str, take: TakeTensor, kernels: Kernels) -> None:
        self._kernels, self._index, self._eps = kernels, index, config.rms_norm_eps
        heads, kv_heads, dim, hidden = config.num_heads, config.num_kv_heads, config.head_dim, config.hidden_size
        self._heads, self._kv_heads, self._dim = heads, kv_heads, dim
        # Stored per head: `dim` rows of query, then `dim` rows of gate. Queries and keys side by side share norm and rotation.
        query_gate = take(f"{prefix}q_proj.weight", heads * 2 * dim, hidden).view(heads, 2, dim, hidden)
        rows = [
            query_gate[:, 0].reshape(heads * dim, hidden),
            take(f"{prefix}k_proj.weight", kv_heads * dim, hidden),
            take(f"{prefix}v_proj.weight", kv_heads * dim, hidden),
            query_gate[:, 1].reshape(heads * dim, hidden),
        ]
        self._in_proj = kernels.prepare_linear(torch.cat(rows))
        self._out_proj = kernels.prepare_linear(take(f"{prefix}o_proj.weight", hidden, heads * dim))
        q_scale, k_scale = (read_norm(take, f"{prefix}{name}_norm.weight", dim) for name in "qk")
        self._scale_HD = torch.cat([q_scale.expand(heads, dim), k_scale.expand(kv_heads, dim)])
        self._splits = [(heads + kv_heads) * dim, kv_heads * dim, heads * dim]

    def __call__(self, x_TN: torch.Tensor, residual_TN: torch.Tensor, step: StepContext) -> torch.Tensor:
        kernels = self._kernels
        step.give_way()
        projected = kernels.linear(x_TN, self._in_proj, stable_rows=step.stable_rows)
        step.give_way()
        qk, v, gate_TX = torch.split(projected, self._splits, dim=-1)
        qk = kernels.norm_rope(qk.view(len(qk), -1, self._dim), self._scale_HD, self._eps, step.cos_TR, step.sin_TR)
        q_THD, k_TGD = torch.split(qk, [self._heads, self._kv_heads], dim=1)
        v_TGD = v.view(len(v), self._kv_heads, self._dim)
        gated_TX = kernels.attention(q_THD, k_TGD, v_TGD, gate_TX, step.memory.kv[self._index], step.plan)
        step.give_way()
        return kernels.linear(gated_TX, self._out_proj, residual_TN, stable_rows=step.stable_rows)


class DeltaNetMixer:
    """Gated DeltaNet: convolution over q, k, v together, gated delta rule, gated norm."""

    def __init__(self, config: ModelConfig, index: int, prefix: str, take: TakeTensor, kernels: Kernels) -> None:
        self._kernels, self._index, self._eps = kernels, index, config.rms_norm_eps
        hidden, channels, values = config.hidden_size, config.conv_channels, config.value_channels
        value_heads = config.linear_num_value_heads
        self._key_heads, self._value_heads = config.linear_num_key_heads, value_heads
        self._splits = [channels, values, value_heads, value_heads]
        self._conv_splits = [config.key_channels, config.key_channels, values]
        names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        rows = [take(f"{prefix}{name}.weight", size, hidden) for name, size in zip(names, self._splits, strict=True)]
        self._in_proj = kernels.prepare_linear(torch.cat(rows))
        self._out_proj = kernels.prepare_linear(take(f"{prefix}out_proj.weight", hidden, values))
        conv = take(f"{prefix}conv1d.weight", channels, 1, config.conv_width, dtype=torch.float32)
        self._conv_WC = conv.squeeze(1).t().contiguous()
        self._neg_rate_V = -take(f"{prefix}A_log", value_heads, dtype=torch.float32).exp()
        self._dt_bias_V = take(f"{prefix}dt_bias", value_heads, dtype=torch.float32)
        self._norm_Q = take(f"{prefix}norm.weight", config.linear_value_head_dim, dtype=torch.float32)

    def __call__(self, x_TN: torch.Tensor, residual_TN: torch.Tensor, step: StepContext) -> torch.Tensor:
        kernels, memory, num_tokens = self._kernels, step.memory, len(x_TN)
        step.give_way()
        projected = kernels.linear(x_TN, self._in_proj, stable_rows=step.stable_rows)
        step.give_way()
        mixed_TC, z, b_TV, a_TV = torch.split(projected, self._splits, dim=-1)
        conv_TC = kernels.causal_conv(mixed_TC, self._conv_WC, memory.conv[self._index], step.plan)
        q, k, v = torch.split(conv_TC, self._conv_splits, dim=-1)
        out_TVQ = kernels.delta_rule(
            q.view(num_tokens, self._key_heads, -1),
            k.view(num_tokens, self._key_heads, -1),
            v.view(num_tokens, self._value_heads, -1),
            stable.softplus(a_TV + self._dt_bias_V).mul_(self._neg_rate_V),
            stable.sigmoid(b_TV),
            memory.recurrent[self._index],
            step.plan,
        )
        gated = kernels.gated_rms_norm(out_TVQ, z.view(num_tokens, self._value_heads, -1), self._norm_Q, self._eps, step.plan)
        step.give_way()
        return kernels.linear(gated.flatten(1), self._out_proj, residual_TN, stable_rows=step.stable_rows)


class Mlp:
    """SwiGLU."""

    def __init__(self, config: ModelConfig, prefix: str, take: TakeTensor, kernels: Kernels) -> None:
        self._kernels = kernels
        hidden, inner = config.hidden_size, config.intermediate_size
        gate, up = (take(f"{prefix}{name}_proj.weight", inner, hidden) for name in ("gate", "up"))
        self._gate_up = kernels.prepare_swiglu(gate, up)
        self._down = kernels.prepare_linear(take(f"{prefix}down_proj.weight", hidden, inner))

    def __call__(self, x_TN: torch.Tensor, residual_TN: torch.Tensor, step: StepContext) -> torch.Tensor:
        step.give_way()
        inner = self._kernels.swiglu(x_TN, self._gate_up, stable_rows=step.stable_rows)
        step.give_way()
        return self._kernels.linear(inner, self._down, residual_TN, stable_rows=step.stable_rows)
