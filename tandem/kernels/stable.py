"""Activations whose value at an element does not depend on where the element lies.

torch's own sigmoid, silu and softplus compute the elements left over by their vector loop with another exp than the loop
does, so a row's last bits change with the batch around it. `exp` and `log1p` have one form, and sums, products and
quotients are exact. A few microseconds each, so decode steps use these and prefill uses torch's.
"""

from __future__ import annotations

import torch

__all__ = ["sigmoid", "silu", "softplus"]

# As a tensor: wrapping a Python number takes longer than a small sum.
_ONE = torch.ones(())


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """fp32."""
    return x.float().neg().exp_().add_(_ONE).reciprocal_()


def silu(x: torch.Tensor) -> torch.Tensor:
    """fp32."""
    x = x.float()
    return x / x.neg().exp_().add_(_ONE)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + e^x) = max(x, 0) + log1p(e^-|x|), which neither overflows nor loses small values; fp32."""
    x = x.float()
    return x.abs().neg_().exp_().log1p_().add_(x.clamp_min(0.0))
