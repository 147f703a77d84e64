"""The seam between the model and the machine: a few coarse operations, each of which one native kernel can stand behind.

Shapes: T new tokens of all sequences in a row (ragged, see `ForwardBatch.cu_seqlens`), B sequences, N and K output and
input features, C convolution channels, W convolution width, H query heads, G key/value heads, D their dimension,
J key heads and V value heads of the delta rule with dimensions P and Q, R rotated dimensions, S state slots.

The operations take what flash-attn's varlen functions (cu_seqlens, block tables) and flash-linear-attention's gated
delta rule (cu_seqlens, initial and final state, q/k l2-norm inside) take, so that an adapter for them is thin.
Caches are changed in place. A sequence without context starts from zeros, whatever its slot holds.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from tandem.model.batch import ForwardBatch

__all__ = ["Kernels"]


class Kernels(Protocol):
    """tile_tokens: rows that a layer best computes at a time. alike_rows: up to so many rows, `linear` gives a row the same
    result whatever the number of rows."""

    name: str
    tile_tokens: int
    alike_rows: int

    def prepare_linear(self, weight_NK: torch.Tensor) -> Any:
        """Take over a weight in the form that `linear` wants, opaque to the model. The caller drops its own reference, since a
        packed copy may replace it."""
        ...

    def plan(self, batch: ForwardBatch, block_size_tokens: int) -> Any:
        """What the operations below need to know about a step, computed once and used by every layer."""
        ...

    def linear(
        self, x_TK: torch.Tensor, weight: Any, residual_TN: torch.Tensor | None = None, *, stable_rows: bool = False
    ) -> torch.Tensor:
        """`x @ weight.T`, plus `residual_TN` when given: `[T, N]` in the dtype of x. `weight` is what `prepare_linear` gave.
        `stable_rows`: a row's result must not depend on the rows beside it (decode: the same tokens alone and in a batch)."""
        ...

    def rms_norm(self, x_TN: torch.Tensor, scale_N: torch.Tensor, eps: float) -> torch.Tensor:
        """x / rms(x) * scale over the last axis, computed in fp32; `scale` (fp32) is the factor itself."""
        ...

    def gated_rms_norm(
        self, x_TVQ: torch.Tensor, gate_TVQ: torch.Tensor, scale_Q: torch.Tensor, eps: float, plan: Any
    ) -> torch.Tensor:
        """rms_norm(x) * scale * silu(gate) per head, in the dtype of gate."""
        ...

    def prepare_swiglu(self, gate_NK: torch.Tensor, up_NK: torch.Tensor) -> Any:
        """As `prepare_linear`, for the pair that `swiglu` takes."""
        ...

    def swiglu(self, x_TK: torch.Tensor, weights: Any, *, stable_rows: bool = False) -> torch.Tensor:
        """silu(x @ gate.T) * (x @ up.T): `[T, N]`."""
        ...

    def norm_rope(
        self, x_THD: torch.Tensor, scale_HD: torch.Tensor, eps: float, cos_TR: torch.Tensor, sin_TR: torch.Tensor
    ) -> torch.Tensor:
        """RMS norm per head, then rotation of the first R dimensions (halves paired, as in GPT-NeoX)."""
        ...

    def causal_conv(self, x_TC: torch.Tensor, weight_WC: torch.Tensor, tails_SC: torch.Tensor, plan: Any) -> torch.Tensor:
        """Depthwise causal convolution, then silu. Reads and rewrites each sequence's last W-1 inputs in
        `tails` `[S, C, W-1]`, oldest first. `weight` is fp32, oldest tap first. Returns `[T, C]` in what `delta_rule` takes."""
        ...

    def delta_rule(
        self,
        q_TJP: torch.Tensor,
        k_TJP: torch.Tensor,
        v_TVQ: torch.Tensor,
        decay_TV: torch.Tensor,
        beta_TV: torch.Tensor,
        states_SVPQ: torch.Tensor,
        plan: Any,
    ) -> torch.Tensor:
        """Gated delta rule over each sequence: state ← exp(decay)·state, then state += k ⊗ β(v − k·state), output q·state.

        q and k are l2-normalised inside (eps 1e-6) and q is scaled by P**-0.5; value head v reads key head v // (V/J).
        decay (log, ≤ 0) and beta are fp32. Reads and rewrites `states` (fp32). Returns `[T, V, Q]`.
        """
        ...

    def attention(
        self,
        q_THD: torch.Tensor,
        k_TGD: torch.Tensor,
        v_TGD: torch.Tensor,
        gate_TX: torch.Tensor,
        kv: torch.Tensor,
        plan: Any,
    ) -> torch.Tensor:
        """Write the new keys and values to their blocks of `kv` `[blocks, 2, block, G, D]`, then causal attention of each
        sequence's new tokens over its whole history, scaled by D**-0.5, times sigmoid(gate). Returns `[T, X]`, X = H·D."""
        ...
