"""From a `ModelSource` to a model that serves, with the fingerprint that both sides of a hand-off compare."""

from __future__ import annotations

import dataclasses
import json
import typing
from dataclasses import dataclass
from pathlib import Path

import xxhash

from tandem.cache.memory import torch_dtype
from tandem.cache.spec import DType
from tandem.config import ModelSource
from tandem.errors import ConfigError
from tandem.kernels.select import select_kernels
from tandem.model.checkpoint import Checkpoint, Progress, Skipped, TensorReader, locate
from tandem.model.config import ModelConfig
from tandem.model.embedded import EMBEDDED_DTYPE, EMBEDDED_NAME, embedded_checkpoint
from tandem.model.hybrid import HybridModel

__all__ = ["LAYOUT_VERSION", "LoadedModel", "load_model"]

LAYOUT_VERSION = 1
"""Raised whenever the bytes of a KV block or a state slot come to mean something else."""


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to serve.

    name: the folder's own name, or the hub id. folder: where its files (and the tokenizer's) lie. fingerprint: equal for
    two workers exactly when they run the same architecture, numbers, cache layout and weights. max_context_tokens: limit
    on prompt and answer together. skipped: tensors of the checkpoint that were not needed.
    """

    model: HybridModel
    config: ModelConfig
    name: str
    folder: Path
    fingerprint: str
    max_context_tokens: int
    skipped: Skipped


def load_model(source: ModelSource, progress: Progress | None = None, device: str = "cpu") -> LoadedModel:
    """Load a checkpoint, tensor by tensor: peak memory is one copy of the weights and one layer's.

    Raises:
        CheckpointError: the checkpoint cannot be served; names the file or tensor.
        ConfigError: dtype, context limit or device make no sense for it.
    """
    folder, name = locate(source.path) if source.path else (embedded_checkpoint(), EMBEDDED_NAME)
    checkpoint = Checkpoint.open(folder)
    wanted = EMBEDDED_DTYPE if source.dtype == "auto" and not source.path else source.dtype
    dtype = _serving_dtype(wanted, checkpoint)
    max_context_tokens = _context_limit(source.max_context_tokens, checkpoint.config)
    kernels = select_kernels(device, torch_dtype(dtype))
    reader = TensorReader(checkpoint, dtype, progress)
    model = HybridModel(checkpoint.config, dtype, reader, reader.head, kernels)
    return LoadedModel(
        model=model,
        config=checkpoint.config,
        name=name,
        folder=folder,
        fingerprint=_fingerprint(checkpoint.config, dtype, reader.weights_digest()),
        max_context_tokens=max_context_tokens,
        skipped=checkpoint.skipped,
    )


def _serving_dtype(wanted: str, checkpoint: Checkpoint) -> DType:
    if wanted == "auto":
        return checkpoint.stored_dtype()
    known = typing.get_args(DType)
    if wanted not in known:
        raise ConfigError(f"model.dtype {wanted!r} is unknown: use auto, {', '.join(known)}")
    return typing.cast(DType, wanted)


def _context_limit(wanted: int, config: ModelConfig) -> int:
    limit = config.max_position_embeddings
    if not 0 <= wanted <= limit:
        raise ConfigError(f"model.max_context_tokens {wanted} must be 0 (the checkpoint's own) or up to {limit}")
    return wanted or limit


def _fingerprint(config: ModelConfig, dtype: DType, weights_digest: str) -> str:
    facts = dataclasses.asdict(config) | {"layer_types": [kind.value for kind in config.layer_types]}
    text = json.dumps([LAYOUT_VERSION, dtype, facts, weights_digest], sort_keys=True)
    return xxhash.xxh3_128_hexdigest(text.encode())
