"""Linear layers on the CPU: weights packed once by oneDNN, rows independent of the batch they stand in."""

from __future__ import annotations

import logging

import torch
from torch.nn import functional

__all__ = ["CpuLinear"]

_log = logging.getLogger(__name__)

# The row count that packing optimises for; oneDNN accepts any later.
_HINT_ROWS = 64
# Up to this many rows oneDNN computes each row alike for bf16; above it another kernel, with another rounding, takes over.
_INVARIANT_ROWS = 32
# fp32 of one row and more than this many features takes a path of its own that rounds differently.
_FP32_SINGLE_ROW_FEATURES = 1024


class CpuLinear:
    """`x @ weight.T`, optionally plus a residual.

    `stable_rows` asks that every row's result be the same whatever rows stand beside it. Where packing is unavailable
    (build without oneDNN, dtype without support), torch's own linear serves and that promise is void.
    """

    def __init__(self, weight_NK: torch.Tensor) -> None:
        self.out_features, self.in_features = weight_NK.shape
        self._packed = _pack(weight_NK)
        self._plain = weight_NK.contiguous() if self._packed is None else None
        self._pad_single = weight_NK.dtype == torch.float32 and self.in_features > _FP32_SINGLE_ROW_FEATURES

    @property
    def is_packed(self) -> bool:
        return self._packed is not None

    def __call__(
        self, x_TK: torch.Tensor, residual_TN: torch.Tensor | None = None, *, stable_rows: bool = False
    ) -> torch.Tensor:
        if self._packed is None:
            assert self._plain is not None
            y_TN = functional.linear(x_TK, self._plain)
            return y_TN if residual_TN is None else y_TN + residual_TN
        rows = x_TK.shape[0]
        if rows == 1 and self._pad_single:
            doubled = None if residual_TN is None else residual_TN.repeat(2, 1)
            return self._run(x_TK.repeat(2, 1), doubled)[:1]
        if not stable_rows or rows <= _INVARIANT_ROWS or x_TK.dtype == torch.float32:
            return self._run(x_TK, residual_TN)
        groups = [slice(i, i + _INVARIANT_ROWS) for i in range(0, rows, _INVARIANT_ROWS)]
        return torch.cat([self._run(x_TK[g], None if residual_TN is None else residual_TN[g]) for g in groups])

    def _run(self, x_TK: torch.Tensor, residual_TN: torch.Tensor | None) -> torch.Tensor:
        linear = torch.ops.mkldnn._linear_pointwise
        if residual_TN is None:
            return linear(x_TK, self._packed, None, "none", [], "")  # type: ignore[no-any-return]
        return linear.binary(x_TK, residual_TN, self._packed, None, "add")  # type: ignore[no-any-return]


def _pack(weight_NK: torch.Tensor) -> torch.Tensor | None:
    if weight_NK.device.type != "cpu":
        return None
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight_NK.contiguous(), _HINT_ROWS)
        torch.ops.mkldnn._linear_pointwise(weight_NK.new_zeros(1, weight_NK.shape[1]), packed, None, "none", [], "")
    except (RuntimeError, AttributeError) as error:  # a torch build or CPU without these operations for this dtype
        _log.warning("weights of %s stay unpacked: %s", weight_NK.dtype, str(error).splitlines()[0])
        return None
    return packed  # type: ignore[no-any-return]
