"""The hybrid model: Gated DeltaNet and gated attention layers over external caches, for a ragged batch.

Every prefill step and every decode step is one `forward`; nothing of a sequence is kept outside `CacheMemory`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from tandem.cache.memory import CacheMemory, torch_dtype
from tandem.cache.spec import CacheSpecs, ConvTailSpec, DType, LayerCache, PagedKvSpec, RecurrentSpec
from tandem.kernels.api import Kernels
from tandem.model.batch import ForwardBatch
from tandem.model.config import LayerType, ModelConfig
from tandem.model.layers import AttentionMixer, DeltaNetMixer, Mixer, Mlp, StepContext, TakeTensor, read_norm
from tandem.model.tiles import cut_into_tiles

__all__ = ["HybridModel"]


def _nothing(*_: int) -> None:
    pass


@dataclass(frozen=True)
class _Layer:
    mixer_norm_N: torch.Tensor
    mixer: Mixer
    mlp_norm_N: torch.Tensor
    mlp: Mlp


class HybridModel:
    """config: architecture. dtype: of weights, activations, KV and convolution tails; the recurrence is always fp32."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: DType,
        take: TakeTensor,
        take_head: Callable[[torch.Tensor], torch.Tensor],
        kernels: Kernels,
    ) -> None:
        """Build from tensors named as under the checkpoint's prefix (`embed_tokens.weight`, `layers.0. …`). `take_head` gets
        the embedding and returns the output projection `[V, N]`, which is the embedding itself when tied."""
        self.config = config
        self.dtype: DType = dtype
        self._kernels = kernels
        hidden = config.hidden_size
        self._embedding_VN = take("embed_tokens.weight", config.vocab_size, hidden)
        self._layers = tuple(self._build_layer(i, kind, take) for i, kind in enumerate(config.layer_types))
        self._final_norm_N = read_norm(take, "norm.weight", hidden)
        self._head = kernels.prepare_linear(take_head(self._embedding_VN))
        exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim
        self._inverse_frequencies = (1.0 / config.rope_theta**exponents).to(self._embedding_VN.device)

    def _build_layer(self, index: int, kind: LayerType, take: TakeTensor) -> _Layer:
        config, kernels, prefix = self.config, self._kernels, f"layers.{index}."
        mixer_norm = read_norm(take, f"{prefix}input_layernorm.weight", config.hidden_size)
        mixer: Mixer
        if kind is LayerType.FULL:
            mixer = AttentionMixer(config, index, f"{prefix}self_attn.", take, kernels)
        else:
            mixer = DeltaNetMixer(config, index, f"{prefix}linear_attn.", take, kernels)
        mlp_norm = read_norm(take, f"{prefix}post_attention_layernorm.weight", config.hidden_size)
        return _Layer(mixer_norm, mixer, mlp_norm, Mlp(config, f"{prefix}mlp.", take, kernels))

    def cache_specs(self, block_size_tokens: int) -> CacheSpecs:
        """What each layer keeps between steps, for KV blocks of this many tokens."""
        config = self.config
        paged = PagedKvSpec(config.num_kv_heads, config.head_dim, block_size_tokens, self.dtype)
        tail = ConvTailSpec(config.key_channels, config.key_channels, config.value_channels, config.conv_width, self.dtype)
        matrix = RecurrentSpec(config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim)
        per_kind: dict[LayerType, LayerCache] = {LayerType.FULL: (paged,), LayerType.LINEAR: (tail, matrix)}
        return CacheSpecs(tuple(per_kind[kind] for kind in config.layer_types))

    @torch.inference_mode()
    def forward(
        self,
        batch: ForwardBatch,
        memory: CacheMemory,
        on_layer: Callable[[int], None] | None = None,
        give_way: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """Run the batch's new tokens, updating the caches: hidden states `[T, N]` after the final norm.

        `on_layer(i)` is called as soon as layer i's caches for this batch are final, before the layer's MLP, so that
        a sender may push them while the rest computes. `give_way()` is called five times for each tile of each layer, before
        the mixer's input projection, core and output projection and before the MLP's two halves, and may run other sequences'
        batches on the same memory.
        """
        on_layer = on_layer or _nothing
        kernels, eps = self._kernels, self.config.rms_norm_eps
        tiles = cut_into_tiles(batch, kernels.tile_tokens, kernels.alike_rows)
        steps = [self._step_context(tile, memory, give_way or _nothing) for _, tile in tiles]
        xs_TN = [functional.embedding(tile.token_ids_T, self._embedding_VN) for _, tile in tiles]
        for index, layer in enumerate(self._layers):
            for i, step in enumerate(steps):
                xs_TN[i] = layer.mixer(kernels.rms_norm(xs_TN[i], layer.mixer_norm_N, eps), xs_TN[i], step)
            on_layer(index)
            for i, step in enumerate(steps):
                xs_TN[i] = layer.mlp(kernels.rms_norm(xs_TN[i], layer.mlp_norm_N, eps), xs_TN[i], step)
        hidden = [kernels.rms_norm(x_TN, self._final_norm_N, eps) for x_TN in xs_TN]
        if len(tiles) == 1:
            return hidden[0]
        return torch.cat(hidden)[torch.cat([rows for rows, _ in tiles]).argsort()]

    @torch.inference_mode()
    def logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """fp32 `[N, V]` of hidden states `[N, D]` that `forward` returned."""
        return self._kernels.linear(hidden_ND, self._head, stable_rows=True).float()

    def _step_context(self, batch: ForwardBatch, memory: CacheMemory, give_way: Callable[[], None]) -> StepContext:
        angles_Tr = batch.positions_T.unsqueeze(1).float() * self._inverse_frequencies
        angles_TR = torch.cat([angles_Tr, angles_Tr], dim=-1)
        return StepContext(
            plan=self._kernels.plan(batch, memory.specs.block_size_tokens),
            memory=memory,
            cos_TR=angles_TR.cos(),
            sin_TR=angles_TR.sin(),
            stable_rows=batch.is_decode,
            give_way=give_way,
        )

    @property
    def tile_tokens(self) -> int:
        """Prompts cut into chunks at multiples of so many positions give the same bits as uncut ones."""
        return self._kernels.tile_tokens

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch_dtype(self.dtype)
