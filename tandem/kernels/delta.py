"""The gated delta rule and its convolution in torch operations (Yang, Kautz, Hatamizadeh: "Gated Delta Networks", 2024).

Legend: n tokens of one sequence, B sequences, c tokens of a chunk, m chunks, C channels, W taps, J key heads, V value
heads, P key and Q value dimensions. Everything is fp32.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from tandem.kernels import stable
from tandem.kernels.plan import CpuPlan

__all__ = ["causal_conv_decode", "causal_conv_ragged", "delta_rule_decode", "delta_rule_ragged"]

CHUNK_TOKENS = 64
_L2_EPS = 1e-6


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
        padded = x_TC.new_empty(width - 1 + span.length, x_TC.shape[1])
        if span.context:
            padded[: width - 1] = tail_Cw.t()
        else:
            padded[: width - 1] = 0
        padded[width - 1 :] = x_TC[span.start : span.end]
        tail_Cw.copy_(padded[span.length :].t())
        y_nC = torch.mul(padded[: span.length], weight_WC[0], out=y_TC[span.start : span.end])
        for tap in range(1, width):
            y_nC.addcmul_(padded[tap : tap + span.length], weight_WC[tap])
    return functional.silu(y_TC, inplace=True)


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
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _L2_EPS)


def _chunked(
    q_nJP: torch.Tensor,
    k_nJP: torch.Tensor,
    v_nVQ: torch.Tensor,
    decay_nV: torch.Tensor,
    beta_nV: torch.Tensor,
    state_VPQ: torch.Tensor,
) -> torch.Tensor:
    """The chunkwise form: inside a chunk the updates are one triangular system, between chunks the state is carried.

    Per chunk with cumulative log decay g: A = tril(β k kᵀ ⊙ e^{g_i − g_j}, −1), U = (I+A)⁻¹ βv, Y = (I+A)⁻¹ β e^g k,
    v' = U − Y S, out = e^g q S + tril(q kᵀ ⊙ e^{g_i − g_j}) v', S ← e^{g_c} S + (e^{g_c − g} k)ᵀ v'.
    """
    length = q_nJP.shape[0]
    group = v_nVQ.shape[1] // k_nJP.shape[1]
    q, k = (_chunks(x, length).repeat_interleave(group, 0) if group > 1 else _chunks(x, length) for x in (q_nJP, k_nJP))
    v = _chunks(v_nVQ, length)
    beta = _chunks(beta_nV.unsqueeze(-1), length)
    g_Vmc = _chunks(decay_nV.unsqueeze(-1), length).squeeze(-1).cumsum(-1)

    chunk = q.shape[2]
    future = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).triu_(1)
    # Masked before exp: above the diagonal the difference is positive and may overflow.
    pair_Vmcc = (g_Vmc.unsqueeze(-1) - g_Vmc.unsqueeze(-2)).masked_fill_(future, float("-inf")).exp_()
    grown_Vmc1 = g_Vmc.exp().unsqueeze(-1)
    k_beta = k * beta
    system = (k_beta @ k.mT).mul_(pair_Vmcc)
    intra = (q @ k.mT).mul_(pair_Vmcc)
    right = torch.cat([v * beta, k_beta * grown_Vmc1], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    u, y = torch.split(solved, [v.shape[-1], k.shape[-1]], dim=-1)
    q = q * grown_Vmc1
    k = k * (g_Vmc[..., -1:] - g_Vmc).exp().unsqueeze(-1)
    end_decay_Vm11 = grown_Vmc1[:, :, -1:, :]

    out = torch.empty_like(v)
    for i in range(q.shape[1]):
        new = torch.baddbmm(u[:, i], y[:, i], state_VPQ, alpha=-1)
        out[:, i] = torch.bmm(q[:, i], state_VPQ).baddbmm_(intra[:, i], new)
        state_VPQ.mul_(end_decay_Vm11[:, i]).baddbmm_(k[:, i].mT, new)
    return out.flatten(1, 2)[:, :length].transpose(0, 1)


def _chunks(x_nHD: torch.Tensor, length: int) -> torch.Tensor:
    """`[n, H, D]` → `[H, chunks, c, D]`, zero-padded: a padded token has decay 0, beta 0 and changes nothing."""
    chunk = min(CHUNK_TOKENS, length)
    pad = -length % chunk
    x_HnD = x_nHD.transpose(0, 1)
    if pad:
        x_HnD = functional.pad(x_HnD, (0, 0, 0, pad))
    return x_HnD.view(x_HnD.shape[0], -1, chunk, x_HnD.shape[2])
