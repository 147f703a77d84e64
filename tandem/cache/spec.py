"""What one layer keeps between steps, as data: how many bytes, in which shape, in which pool.

Two pools exist and never share a page size. KV grows with the context and lives in blocks; the convolution tail and the
recurrent matrix have one size per sequence and live in a slot. Nothing outside the model package asks which kind of
layer it deals with: it asks the spec.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

__all__ = ["CacheSpecs", "ConvTailSpec", "DType", "LayerCache", "PagedKvSpec", "RecurrentSpec", "dtype_bytes"]

DType = Literal["float32", "bfloat16", "float16"]


def dtype_bytes(dtype: DType) -> int:
    return 4 if dtype == "float32" else 2


@dataclass(frozen=True, slots=True)
class PagedKvSpec:
    """Keys and values of one attention layer. One item = one block: `[2, block_size_tokens, num_kv_heads, head_dim]`,
    keys first. Written once, never changed after."""

    num_kv_heads: int
    head_dim: int
    block_size_tokens: int
    dtype: DType

    @property
    def item_shape(self) -> tuple[int, ...]:
        return (2, self.block_size_tokens, self.num_kv_heads, self.head_dim)

    @property
    def item_bytes(self) -> int:
        return math.prod(self.item_shape) * dtype_bytes(self.dtype)

    @property
    def bytes_per_token(self) -> int:
        return self.item_bytes // self.block_size_tokens


@dataclass(frozen=True, slots=True)
class ConvTailSpec:
    """The last `width - 1` inputs of the causal convolution of one DeltaNet layer. One item = one slot:
    `[query_channels + key_channels + value_channels, width - 1]`, oldest first. The three row groups are cut apart
    under tensor parallelism, never the whole as one block."""

    query_channels: int
    key_channels: int
    value_channels: int
    width: int
    dtype: DType

    @property
    def item_shape(self) -> tuple[int, ...]:
        return (self.query_channels + self.key_channels + self.value_channels, self.width - 1)

    @property
    def item_bytes(self) -> int:
        return math.prod(self.item_shape) * dtype_bytes(self.dtype)


@dataclass(frozen=True, slots=True)
class RecurrentSpec:
    """The delta-rule memory of one DeltaNet layer. One item = one slot: `[num_heads, key_dim, value_dim]`.
    Rewritten by every token; fp32, since bf16 drifts within tens of tokens."""

    num_heads: int
    key_dim: int
    value_dim: int
    dtype: DType = "float32"

    @property
    def item_shape(self) -> tuple[int, ...]:
        return (self.num_heads, self.key_dim, self.value_dim)

    @property
    def item_bytes(self) -> int:
        return math.prod(self.item_shape) * dtype_bytes(self.dtype)


LayerCache = tuple[PagedKvSpec] | tuple[ConvTailSpec, RecurrentSpec]


@dataclass(frozen=True, slots=True)
class CacheSpecs:
    """The caches of a whole model: entry i belongs to layer i."""

    layers: tuple[LayerCache, ...]

    @property
    def block_size_tokens(self) -> int:
        """Tokens per KV block; 1 for a model without attention layers."""
        for layer in self.layers:
            if isinstance(layer[0], PagedKvSpec):
                return layer[0].block_size_tokens
        return 1

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all attention layers."""
        return sum(layer[0].item_bytes for layer in self.layers if isinstance(layer[0], PagedKvSpec))

    @property
    def slot_bytes(self) -> int:
        """Bytes of one state slot over all DeltaNet layers: also the size of one recurrent checkpoint."""
        return sum(spec.item_bytes for layer in self.layers for spec in layer if isinstance(spec, ConvTailSpec | RecurrentSpec))

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` positions occupy."""
        return -(-num_tokens // self.block_size_tokens)
