"""The gated delta rule and its convolution in torch operations (Yang, Kautz, Hatamizadeh: "Gated Delta Networks", 2024).

Legend: n tokens of one sequence, B sequences, m chunks of c tokens, C channels, W taps, J key heads, V value
heads, P key and Q value dimensions. Everything is fp32.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from tandem.kernels import stable
from tandem.kernels.plan import CpuPlan

__all__ = ["causal_conv_decode", "causal_conv_ragged", "delta_rule_decode", "delta_rule_ragged"]

# On AVX-512 with 64- or 128-dimensional heads, 32 takes three quarters of the time of 64, as less is squared; 16 no less.
CHUNK_TOKENS = 32
_L2_EPS = torch.tensor(1e-6)


def causal_conv_decode(x_BC: torch.Tensor, weight_WC: torch.Tensor, tails_SCw: torch.Tensor, plan: CpuPlan) -> torch.Tensor:
    tail_BCw = tails_SCw[plan.slot_range] if plan.slot_range else tails_SCw.index_select(0, plan.slots_B)
    window_BCW = torch.cat([tail_BCw, x_BC.unsqueeze(2)], dim=2)
    if plan.slot_range:
        tail_BCw.copy_(window_BCW[:, :, 1:])
    else:
        tails_SCw.index_copy_(0, plan.slots_B, window_BCW[:, :, 1:])
    return stable.silu((window_BCW * weight_WC.t()).sum(2))


def causal_conv_ragged(x_TC: torch.Tensor, weight_WC: torch.Tensor, tails_SCw: torch.Tensor, plan: CpuPlan) -> torch.Tensor:
    width = weight_WC.shape[0]
    y_TC = torch.empty(x_TC.shape, dtype=torch.float32, device=x_TC.device)
    for span in plan.spans:
        tail_Cw = tails_SCw[span.slot]
        # fp32 at once: the taps below run several times faster over one dtype.
        padded = torch.empty(width - 1 + span.length, x_TC.shape[1], dtype=torch.float32, device=x_TC.device)
        if span.context:
            padded[: width - 1] = tail_Cw.t()
        else:
            padded[: width - 1] = 0
        padded[width - 1 :] = x_TC[span.start : span.end]
        tail_Cw.copy_(padded[span.length :].t())
        y_nC = torch.mul(padded[: span.length], weight_WC[0], out=y_TC[span.start : span.end])
        for tap in range(1, width):
            y_nC.addcmul_(padded[tap : tap + span.length], weight_WC[tap])
    return stable.silu(y_TC) if plan.is_exact else functional.silu(y_TC, inplace=True)


def delta_rule_decode(
    q_BJP: torch.Tensor,
    k_BJP: torch.Tensor,
    v_BVQ: torch.Tensor,
    decay_BV: torch.Tensor,
    beta_BV: torch.Tensor,
    states_SVPQ: torch.Tensor,
    plan: CpuPlan,
) -> torch.Tensor:
    """One token per sequence. The old state is read once, for k and q together: with S' = e·S + k ⊗ δ and
    δ = β(v − e·kS), the output is q·S' = e·qS + (q·k)δ."""
    batch, num_key_heads, key_dim = k_BJP.shape
    group = v_BVQ.shape[1] // num_key_heads
    state = states_SVPQ[plan.slot_range] if plan.slot_range else states_SVPQ.index_select(0, plan.slots_B)
    state_BJGPQ = state.view(batch, num_key_heads, group, *state.shape[2:])
    kq_BJ2P = _l2_normalised(torch.stack([k_BJP, q_BJP], dim=2))
    kq_BJ2P[:, :, 1] *= key_dim**-0.5
    read_BJG2Q = kq_BJ2P.unsqueeze(2) @ state_BJGPQ
    e_BJG1 = decay_BV.exp().view(batch, num_key_heads, group, 1)
    read_BJG2Q *= e_BJG1.unsqueeze(-1)
    delta_BJGQ = v_BVQ.view(batch, num_key_heads, group, -1) - read_BJG2Q[:, :, :, 0]
    delta_BJGQ *= beta_BV.view(batch, num_key_heads, group, 1)
    qk_BJ11 = (kq_BJ2P[:, :, 0] * kq_BJ2P[:, :, 1]).sum(-1)[..., None, None]
    out_BJGQ = torch.addcmul(read_BJG2Q[:, :, :, 1], qk_BJ11, delta_BJGQ)
    state_BJGPQ.mul_(e_BJG1.unsqueeze(-1))
    state_BJGPQ.addcmul_(kq_BJ2P[:, :, 0, None, :, None], delta_BJGQ.unsqueeze(3))
    if not plan.slot_range:
        states_SVPQ.index_copy_(0, plan.slots_B, state)
    return out_BJGQ.flatten(1, 2)


def delta_rule_ragged(
    q_TJP: torch.Tensor,
    k_TJP: torch.Tensor,
    v_TVQ: torch.Tensor,
    decay_TV: torch.Tensor,
    beta_TV: torch.Tensor,
    states_SVPQ: torch.Tensor,
    plan: CpuPlan,
) -> torch.Tensor:
    out_TVQ = torch.empty(v_TVQ.shape, dtype=torch.float32, device=v_TVQ.device)
    q_TJP = _l2_normalised(q_TJP).mul_(q_TJP.shape[-1] ** -0.5)
    k_TJP = _l2_normalised(k_TJP)
    for span in plan.spans:
        rows = slice(span.start, span.end)
        state_VPQ = states_SVPQ[span.slot]
        if not span.context:
            state_VPQ.zero_()
        out_TVQ[rows] = _chunked(q_TJP[rows], k_TJP[rows], v_TVQ[rows], decay_TV[rows], beta_TV[rows], state_VPQ)
    return out_TVQ


def _l2_normalised(x: torch.Tensor) -> torch.Tensor:
    return x * (x * x).sum(-1, keepdim=True).add_(_L2_EPS).rsqrt_()


def _chunked(
    q_nJP: torch.Tensor,
    k_nJP: torch.Tensor,
    v_nVQ: torch.Tensor,
    decay_nV: torch.Tensor,
    beta_nV: torch.Tensor,
    state_VPQ: torch.Tensor,
) -> torch.Tensor:
    """The chunkwise form: inside a chunk the updates are one triangular system, between chunks the state is carried.

    Per chunk with cumulative log decay g: T = (I + tril(β k kᵀ ⊙ e^{g_i − g_j}, −1))⁻¹ diag(β), v' = T (v − e^g k S),
    out = e^g q S + tril(q kᵀ ⊙ e^{g_i − g_j}) v', S ← e^{g_c} S + (e^{g_c − g} k)ᵀ v'. Products of keys and queries are
    made once per key head, for all its value heads.
    """
    length, num_keys, num_values = q_nJP.shape[0], q_nJP.shape[1], v_nVQ.shape[1]
    q_mJcP, k_mJcP = _chunks(q_nJP), _chunks(k_nJP)
    v_mVcQ, beta_mVc1 = _chunks(v_nVQ), _chunks(beta_nV.unsqueeze(-1))
    g_mVc1 = _chunks(decay_nV.unsqueeze(-1)).cumsum(2)
    grown_mVc1 = g_mVc1.exp()

    def per_value_head(x_mJ: torch.Tensor, factor_mV: torch.Tensor) -> torch.Tensor:
        product = x_mJ.unsqueeze(2) * factor_mV.view(len(x_mJ), num_keys, -1, *factor_mV.shape[2:])
        return product.view(len(x_mJ), num_values, *product.shape[3:])

    # Cut off before exp, since above the diagonal the difference is positive and may overflow.
    pair_mVcc = (g_mVc1 - g_mVc1.mT).tril_().exp_()
    intra_mVcc = per_value_head(q_mJcP @ k_mJcP.mT, pair_mVcc).tril_()
    system_mVcc = per_value_head(k_mJcP @ k_mJcP.mT, pair_mVcc).mul_(beta_mVc1)
    eye_cc = torch.eye(system_mVcc.shape[-1], device=system_mVcc.device)
    # The solver reads below the diagonal alone.
    inverse_mVcc = torch.linalg.solve_triangular(system_mVcc, eye_cc, upper=False, unitriangular=True)
    inverse_mVcc = inverse_mVcc * beta_mVc1.mT
    k_grown, q_grown = per_value_head(k_mJcP, grown_mVc1), per_value_head(q_mJcP, grown_mVc1)
    k_to_end = per_value_head(k_mJcP, (g_mVc1[:, :, -1:] - g_mVc1).exp_())
    end_decay_mV11 = grown_mVc1[:, :, -1:]

    out_mVcQ = torch.empty_like(v_mVcQ, memory_format=torch.contiguous_format)
    for i, out_VcQ in enumerate(out_mVcQ):
        new = torch.bmm(inverse_mVcc[i], torch.baddbmm(v_mVcQ[i], k_grown[i], state_VPQ, alpha=-1))
        torch.bmm(q_grown[i], state_VPQ, out=out_VcQ).baddbmm_(intra_mVcc[i], new)
        state_VPQ.mul_(end_decay_mV11[i]).baddbmm_(k_to_end[i].mT, new)
    return out_mVcQ.transpose(1, 2).flatten(0, 1)[:length]


def _chunks(x_nHD: torch.Tensor) -> torch.Tensor:
    """`[n, H, D]` → `[chunks, H, c, D]`, zero-padded: a padded token has decay 0, beta 0 and changes nothing."""
    length = x_nHD.shape[0]
    chunk = min(CHUNK_TOKENS, length)
    if pad := -length % chunk:
        x_nHD = functional.pad(x_nHD, (0, 0, 0, 0, 0, pad))
    return x_nHD.view(-1, chunk, *x_nHD.shape[1:]).transpose(1, 2)
