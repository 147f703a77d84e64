"""Chunked gated delta rule that autograd can differentiate quickly on CPU.

Per head, with keys and queries of unit length, decay exp(g) and write strength beta (Yang et al., "Gated Delta Networks",
2024):

    S_t = exp(g_t) S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T,    o_t = S_t q_t / sqrt(K)

Shape letters: B batch, T time, H value heads, G key heads, K key width, V value width, N chunks, C positions in a chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["gated_delta_rule"]

_LEAF = 8  # blocks of this size are inverted by substitution, larger ones from their halves


def _inverse(a: Tensor) -> Tensor:
    """(I + a)^-1 for strictly lower triangular a [..., C, C], C = 8 * 2^m, as stable as substitution.

    inv([[P, 0], [R, Q]]) = [[P^-1, 0], [-Q^-1 R P^-1, Q^-1]], level by level, all blocks of a level at once.
    """
    size = a.shape[-1]
    flat = a.reshape(-1, size, size)
    count = size // _LEAF
    blocks = flat.view(-1, count, _LEAF, count, _LEAF)
    diagonal = torch.stack([blocks[:, i, :, i, :] for i in range(count)], 1)
    inverse = torch.eye(_LEAF, dtype=a.dtype).expand_as(diagonal).clone()
    for row in range(1, _LEAF):
        inverse[..., row, :row] = -(diagonal[..., row, None, :row] @ inverse[..., :row, :row]).squeeze(-2)
    width = _LEAF
    while width < size:
        pairs = size // (2 * width)
        halves = flat.view(-1, pairs, 2, width, pairs, 2, width)
        lower = torch.stack([halves[:, i, 1, :, i, 0, :] for i in range(pairs)], 1)
        first, second = inverse[:, 0::2], inverse[:, 1::2]
        corner = -(second @ lower @ first)
        top = torch.cat([first, torch.zeros_like(first)], -1)
        inverse = torch.cat([top, torch.cat([corner, second], -1)], -2)
        width *= 2
    return inverse.reshape(a.shape)


@torch.library.custom_op("train_embedded::unit_lower_inverse", mutates_args=())
def _unit_lower_inverse(a: Tensor) -> Tensor:
    return _inverse(a)


@_unit_lower_inverse.register_fake
def _(a: Tensor) -> Tensor:
    return torch.empty_like(a)


def _keep_inverse(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(output)


def _inverse_backward(ctx, grad: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
    (inverse,) = ctx.saved_tensors
    transposed = inverse.transpose(-1, -2)
    return -(transposed @ grad @ transposed)


_unit_lower_inverse.register_autograd(_inverse_backward, setup_context=_keep_inverse)


@torch.library.custom_op("train_embedded::scan", mutates_args=())
def _scan(u: Tensor, w: Tensor, k: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence over chunks: written values [B, N, C, V] and the state at each chunk's start [B, N, K, V].

    u [B, N, C, V], w and k [B, N, C, K], gamma [B, N]: new_n = u_n - w_n S_n, S_{n+1} = gamma_n S_n + k_n^T new_n.
    """
    batch, chunks, _, width = k.shape
    new = torch.empty_like(u)
    states = u.new_zeros(batch, chunks, width, u.shape[-1])
    state = states[:, 0]
    for n in range(chunks):
        value = torch.baddbmm(u[:, n], w[:, n], state, alpha=-1)
        new[:, n] = value
        if n + 1 < chunks:
            state = torch.baddbmm(state * gamma[:, n, None, None], k[:, n].transpose(1, 2), value)
            states[:, n + 1] = state
    return new, states


@_scan.register_fake
def _(u: Tensor, w: Tensor, k: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(u), u.new_empty(k.shape[0], k.shape[1], k.shape[3], u.shape[3])


@torch.library.custom_op("train_embedded::scan_backward", mutates_args=())
def _scan_backward(
    grad_new: Tensor, grad_states: Tensor, w: Tensor, k: Tensor, gamma: Tensor, new: Tensor, states: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    chunks = k.shape[1]
    grad_u = torch.empty_like(new)
    carried = torch.empty_like(states)  # gradient of the state after chunk n
    carry = torch.zeros_like(states[:, 0])
    for n in reversed(range(chunks)):
        carried[:, n] = carry
        written = torch.baddbmm(grad_new[:, n], k[:, n], carry)
        grad_u[:, n] = written
        carry = torch.baddbmm(grad_states[:, n] + carry * gamma[:, n, None, None], w[:, n].transpose(1, 2), written, alpha=-1)
    grad_w = -(grad_u @ states.transpose(-1, -2))
    grad_k = new @ carried.transpose(-1, -2)
    return grad_u, grad_w, grad_k, (states * carried).sum((-1, -2))


@_scan_backward.register_fake
def _(
    grad_new: Tensor, grad_states: Tensor, w: Tensor, k: Tensor, gamma: Tensor, new: Tensor, states: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.empty_like(new), torch.empty_like(w), torch.empty_like(k), torch.empty_like(gamma)


def _keep_scan(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    _, w, k, gamma = inputs
    ctx.save_for_backward(w, k, gamma, *output)


def _scan_gradients(ctx, grad_new: Tensor, grad_states: Tensor):  # type: ignore[no-untyped-def]
    w, k, gamma, new, states = ctx.saved_tensors
    return _scan_backward(grad_new.contiguous(), grad_states.contiguous(), w, k, gamma, new, states)


_scan.register_autograd(_scan_gradients, setup_context=_keep_scan)


def _chunked(x_BTHX: Tensor, chunk: int) -> Tensor:
    """[B, T, H, X] → [B, H, N, C, X]."""
    batch, time, heads, width = x_BTHX.shape
    return x_BTHX.view(batch, time // chunk, chunk, heads, width).permute(0, 3, 1, 2, 4)


def gated_delta_rule(q_BTGK: Tensor, k_BTGK: Tensor, v_BTHV: Tensor, g_BTH: Tensor, beta_BTH: Tensor, chunk: int) -> Tensor:
    """Outputs [B, T, H, V] in fp32 from fp32 inputs; T is a multiple of chunk, chunk is 8 times a power of two.

    q and k are normalised here; key head j serves value heads j * H / G up to (j + 1) * H / G. The state starts at zero.
    """
    batch, time, heads, width = v_BTHV.shape
    groups = heads // q_BTGK.shape[2]
    q = _chunked(functional.normalize(q_BTGK, dim=-1, eps=1e-6) * q_BTGK.shape[-1] ** -0.5, chunk)
    k = _chunked(functional.normalize(k_BTGK, dim=-1, eps=1e-6), chunk)
    v = _chunked(v_BTHV, chunk)
    beta = _chunked(beta_BTH.unsqueeze(-1), chunk)
    total = _chunked(g_BTH.unsqueeze(-1), chunk).cumsum(3)
    lower = torch.ones(chunk, chunk, dtype=torch.bool).tril()
    decay = (total - total.transpose(-1, -2)).masked_fill(~lower, float("-inf")).exp()
    kk = (k @ k.transpose(-1, -2)).repeat_interleave(groups, 1)
    attention = (q @ k.transpose(-1, -2)).repeat_interleave(groups, 1) * decay
    inverse = _unit_lower_inverse((kk * decay * beta).tril(-1).contiguous())
    k_H, q_H = k.repeat_interleave(groups, 1), q.repeat_interleave(groups, 1)
    u = inverse @ (v * beta)
    w = inverse @ (k_H * (beta * total.exp()))
    last = total[:, :, :, -1:, :]
    keys = k_H * (last - total).exp()
    new, states = _scan(
        u.flatten(0, 1).contiguous(),
        w.flatten(0, 1).contiguous(),
        keys.flatten(0, 1).contiguous(),
        last.exp().flatten(0, 1).flatten(1).contiguous(),
    )
    out = (q_H * total.exp()) @ states.unflatten(0, (batch, heads)) + attention @ new.unflatten(0, (batch, heads))
    return out.permute(0, 2, 3, 1, 4).reshape(batch, time, heads, width)
