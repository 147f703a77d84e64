"""Muon for the matrices: momentum, then an update with all singular values near one (Jordan et al., 2024)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["Muon"]


def _orthogonal(grads: Tensor) -> Tensor:
    """Newton-Schulz iteration, five steps in bf16, on a stack of matrices [N, R, C]."""
    a, b, c = 3.4445, -4.7750, 2.0315
    wide = grads.shape[-2] <= grads.shape[-1]
    x = grads if wide else grads.transpose(-1, -2)
    x = (x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)).bfloat16()
    for _ in range(5):
        gram = x @ x.transpose(-1, -2)
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    x = x.float()
    return x if wide else x.transpose(-1, -2)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum; matrices of equal shape are updated together. An update's entries have rms 0.2 * lr, as AdamW's."""

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for param in (p for p in group["params"] if p.grad is not None):
                by_shape.setdefault(param.shape, []).append(param)
            for shape, params in by_shape.items():
                self._step_equal(params, max(shape), group["lr"], group["momentum"], group["weight_decay"])

    def _step_equal(self, params: list[Tensor], longer: int, lr: float, momentum: float, weight_decay: float) -> None:
        for param in params:
            self.state[param].setdefault("momentum", torch.zeros_like(param))
        buffers = [self.state[param]["momentum"] for param in params]
        grads = [param.grad for param in params]
        torch._foreach_lerp_(buffers, grads, 1.0 - momentum)
        updates = _orthogonal(torch.stack(torch._foreach_lerp(grads, buffers, momentum)))
        torch._foreach_mul_(params, 1.0 - lr * weight_decay)
        torch._foreach_add_(params, list(updates.unbind(0)), alpha=-0.2 * lr * longer**0.5)
