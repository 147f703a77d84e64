"""`Kernels` in plain torch for the CPU: the reference that every other implementation is checked against."""

from __future__ import annotations

import functools

import torch
from torch.nn import functional

from tandem.kernels import stable
from tandem.kernels.delta import causal_conv_decode, causal_conv_ragged, delta_rule_decode, delta_rule_ragged
from tandem.kernels.linear import ALIKE_ROWS, CpuLinear, CpuSwiglu
from tandem.kernels.plan import CpuPlan, Span
from tandem.model.batch import ForwardBatch

__all__ = ["TorchCpuKernels"]


class TorchCpuKernels:
    """dtype: of activations and KV."""

    name = "torch-cpu"
    # 256 rows of the widest intermediate result stay in a core's second-level cache, and fill oneDNN's tiles.
    tile_tokens = 256
    alike_rows = ALIKE_ROWS

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def prepare_linear(self, weight_NK: torch.Tensor) -> CpuLinear:
        return CpuLinear(weight_NK)

    def plan(self, batch: ForwardBatch, block_size_tokens: int) -> CpuPlan:
        return CpuPlan.make(batch, block_size_tokens, self._dtype)

    def linear(
        self, x_TK: torch.Tensor, weight: CpuLinear, residual_TN: torch.Tensor | None = None, *, stable_rows: bool = False
    ) -> torch.Tensor:
        return weight(x_TK, residual_TN, stable_rows=stable_rows)

    def rms_norm(self, x_TN: torch.Tensor, scale_N: torch.Tensor, eps: float) -> torch.Tensor:
        x = x_TN.float()
        return torch.mul(x, _inverse_rms(x, eps)).mul_(scale_N).to(x_TN.dtype)

    def gated_rms_norm(
        self, x_TVQ: torch.Tensor, gate_TVQ: torch.Tensor, scale_Q: torch.Tensor, eps: float, plan: CpuPlan
    ) -> torch.Tensor:
        normed = x_TVQ * _inverse_rms(x_TVQ, eps)
        return normed.mul_(scale_Q).mul_(_silu(gate_TVQ.float(), plan)).to(gate_TVQ.dtype)

    def prepare_swiglu(self, gate_NK: torch.Tensor, up_NK: torch.Tensor) -> CpuSwiglu:
        return CpuSwiglu(gate_NK, up_NK)

    def swiglu(self, x_TK: torch.Tensor, weights: CpuSwiglu, *, stable_rows: bool = False) -> torch.Tensor:
        return weights(x_TK, stable_rows=stable_rows)

    def norm_rope(
        self, x_THD: torch.Tensor, scale_HD: torch.Tensor, eps: float, cos_TR: torch.Tensor, sin_TR: torch.Tensor
    ) -> torch.Tensor:
        x = x_THD.float()
        x = torch.mul(x, _inverse_rms(x, eps)).mul_(scale_HD)
        half = cos_TR.shape[-1] // 2
        rotated = x[..., : 2 * half]
        swapped = torch.cat([-rotated[..., half:], rotated[..., :half]], dim=-1)
        rotated.mul_(cos_TR.unsqueeze(1)).addcmul_(swapped, sin_TR.unsqueeze(1))
        return x.to(x_THD.dtype)

    def causal_conv(self, x_TC: torch.Tensor, weight_WC: torch.Tensor, tails_SC: torch.Tensor, plan: CpuPlan) -> torch.Tensor:
        conv = causal_conv_decode if plan.is_decode else causal_conv_ragged
        return conv(x_TC, weight_WC, tails_SC, plan)

    def delta_rule(
        self,
        q_TJP: torch.Tensor,
        k_TJP: torch.Tensor,
        v_TVQ: torch.Tensor,
        decay_TV: torch.Tensor,
        beta_TV: torch.Tensor,
        states_SVPQ: torch.Tensor,
        plan: CpuPlan,
    ) -> torch.Tensor:
        rule = delta_rule_decode if plan.is_decode else delta_rule_ragged
        return rule(q_TJP, k_TJP, v_TVQ, decay_TV, beta_TV, states_SVPQ, plan)

    def attention(
        self,
        q_THD: torch.Tensor,
        k_TGD: torch.Tensor,
        v_TGD: torch.Tensor,
        gate_TX: torch.Tensor,
        kv: torch.Tensor,
        plan: CpuPlan,
    ) -> torch.Tensor:
        kv.flatten(0, 2).index_copy_(0, plan.kv_rows_2T, torch.cat([k_TGD, v_TGD]))
        history = kv.flatten(0, 1).index_select(0, plan.gather_2W)
        keys, values = history.flatten(0, 1).chunk(2)
        block_size = kv.shape[2]
        out_THD = torch.empty_like(q_THD)
        offset = 0
        for span in plan.spans:
            rows = slice(span.start, span.end)
            if span.context:
                cached = slice(offset, offset + span.total)
                offset += span.num_blocks * block_size
                k_LGD, v_LGD = keys[cached], values[cached]
            else:
                k_LGD, v_LGD = k_TGD[rows], v_TGD[rows]
            out_THD[rows] = _attend(q_THD[rows], k_LGD, v_LGD, span)
        open_TX = stable.sigmoid(gate_TX) if plan.is_exact else gate_TX.sigmoid()
        return open_TX.mul_(out_THD.flatten(1)).to(q_THD.dtype)


def _inverse_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / sqrt(mean(x²) + eps) over the last axis, kept; the norm makes no squared copy of x."""
    norm: torch.Tensor = torch.linalg.vector_norm(x, 2, -1, True)
    return torch.addcmul(_constant(eps), norm, norm, value=1.0 / x.shape[-1]).rsqrt_()


@functools.cache
def _constant(value: float) -> torch.Tensor:
    """A number as a tensor: torch would wrap a Python number anew at each use, which takes longer than a small sum."""
    with torch.inference_mode(False):
        return torch.tensor(value)


def _silu(x: torch.Tensor, plan: CpuPlan) -> torch.Tensor:
    return stable.silu(x) if plan.is_exact else functional.silu(x)


def _attend(q_nHD: torch.Tensor, k_LGD: torch.Tensor, v_LGD: torch.Tensor, span: Span) -> torch.Tensor:
    """Grouped heads without copying keys: key/value heads stand on SDPA's batch axis. A single query needs no mask, so
    its group's heads stand on the query axis instead."""
    group = q_nHD.shape[1] // k_LGD.shape[1]
    k_G1LD, v_G1LD = k_LGD.transpose(0, 1).unsqueeze(1), v_LGD.transpose(0, 1).unsqueeze(1)
    if span.length == 1:
        q_G1gD = q_nHD.view(-1, 1, group, q_nHD.shape[2])
        return functional.scaled_dot_product_attention(q_G1gD, k_G1LD, v_G1LD).view_as(q_nHD)
    q_GgnD = q_nHD.view(q_nHD.shape[0], -1, group, q_nHD.shape[2]).permute(1, 2, 0, 3)
    out_GgnD = functional.scaled_dot_product_attention(
        q_GgnD,
        k_G1LD.expand(-1, group, -1, -1),
        v_G1LD.expand(-1, group, -1, -1),
        attn_mask=span.mask,
        is_causal=span.mask is None,
    )
    return out_GgnD.permute(2, 0, 1, 3).flatten(1, 2)
