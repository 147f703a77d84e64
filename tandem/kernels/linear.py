"""Linear layers on the CPU: weights packed once by oneDNN, rows independent of the batch they stand in."""

from __future__ import annotations

import logging

import torch
from torch.nn import functional

from tandem.errors import first_line
from tandem.kernels import stable

__all__ = ["ALIKE_ROWS", "CpuLinear", "CpuSwiglu"]

_log = logging.getLogger(__name__)

# The row count that packing optimises for; oneDNN accepts any later.
_HINT_ROWS = 64
# Up to this many rows oneDNN computes each row alike in bf16 and fp16, by any number of threads; above it another kernel, with
# another rounding, takes over. In fp32 every row count is alike.
ALIKE_ROWS = 32
# A single row of more features than this takes a path of its own, with another rounding, so it is computed as two.
_SINGLE_ROW_FEATURES = {torch.float32: 1024, torch.bfloat16: 8192}


class CpuLinear:
    """`x @ weight.T`, then one fused operation.

    `stable_rows` asks that every row's result be the same whatever rows stand beside it. Where packing is unavailable
    (build without oneDNN, dtype without support), torch's own linear serves and that promise is void.
    """

    def __init__(self, weight_NK: torch.Tensor) -> None:
        self.out_features, self.in_features = weight_NK.shape
        self._packed = _pack(weight_NK)
        self._plain = weight_NK.contiguous() if self._packed is None else None
        self._pad_single = self.in_features > _SINGLE_ROW_FEATURES.get(weight_NK.dtype, 1024)

    @property
    def is_packed(self) -> bool:
        return self._packed is not None

    def __call__(
        self, x_TK: torch.Tensor, residual_TN: torch.Tensor | None = None, *, stable_rows: bool = False
    ) -> torch.Tensor:
        """Plus the residual, when given."""
        return self._grouped(x_TK, "none" if residual_TN is None else "add", residual_TN, stable_rows)

    def times(self, x_TK: torch.Tensor, other_TN: torch.Tensor, *, stable_rows: bool = False) -> torch.Tensor:
        return self._grouped(x_TK, "mul", other_TN, stable_rows)

    def silu(self, x_TK: torch.Tensor, *, stable_rows: bool = False) -> torch.Tensor:
        return self._grouped(x_TK, "swish", None, stable_rows)

    def _grouped(self, x_TK: torch.Tensor, then: str, other_TN: torch.Tensor | None, stable_rows: bool) -> torch.Tensor:
        rows = x_TK.shape[0]
        if not stable_rows or rows <= ALIKE_ROWS or x_TK.dtype == torch.float32:
            return self._run(x_TK, then, other_TN)
        groups = [slice(i, i + ALIKE_ROWS) for i in range(0, rows, ALIKE_ROWS)]
        return torch.cat([self._run(x_TK[g], then, None if other_TN is None else other_TN[g]) for g in groups])

    def _run(self, x_TK: torch.Tensor, then: str, other_TN: torch.Tensor | None) -> torch.Tensor:
        if self._packed is None:
            assert self._plain is not None
            return _then(functional.linear(x_TK, self._plain), then, other_TN)
        if self._pad_single and x_TK.shape[0] == 1:
            return self._run(x_TK.repeat(2, 1), then, None if other_TN is None else other_TN.repeat(2, 1))[:1]
        if other_TN is None:
            return torch.ops.mkldnn._linear_pointwise(x_TK, self._packed, None, then, [], "")  # type: ignore[no-any-return]
        return torch.ops.mkldnn._linear_pointwise.binary(x_TK, other_TN, self._packed, None, then)  # type: ignore[no-any-return]


class CpuSwiglu:
    """silu(x @ gate.T) * (x @ up.T): two products with the rest fused into them, so that no pass over memory is left."""

    def __init__(self, gate_NK: torch.Tensor, up_NK: torch.Tensor) -> None:
        self._gate = CpuLinear(gate_NK)
        self._up = CpuLinear(up_NK)

    def __call__(self, x_TK: torch.Tensor, *, stable_rows: bool = False) -> torch.Tensor:
        return self._up.times(x_TK, self._gate.silu(x_TK, stable_rows=stable_rows), stable_rows=stable_rows)


def _then(y_TN: torch.Tensor, then: str, other_TN: torch.Tensor | None) -> torch.Tensor:
    if then == "swish":
        return stable.silu(y_TN).to(y_TN.dtype)
    if other_TN is None:
        return y_TN
    return y_TN + other_TN if then == "add" else y_TN * other_TN


def _pack(weight_NK: torch.Tensor) -> torch.Tensor | None:
    if weight_NK.device.type != "cpu":
        return None
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight_NK.contiguous(), _HINT_ROWS)
        torch.ops.mkldnn._linear_pointwise(weight_NK.new_zeros(1, weight_NK.shape[1]), packed, None, "none", [], "")
    except (RuntimeError, AttributeError) as error:  # a torch build or CPU without these operations for this dtype
        _log.warning("weights of %s stay unpacked: %s", weight_NK.dtype, first_line(error))
        return None
    return packed  # type: ignore[no-any-return]
