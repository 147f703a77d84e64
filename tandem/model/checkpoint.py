"""A checkpoint on disk or on the Hugging Face hub, checked against its architecture before a weight is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import xxhash
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError

from tandem.cache.memory import torch_dtype
from tandem.cache.spec import DType
from tandem.errors import CheckpointError
from tandem.model.config import ModelConfig
from tandem.model.shards import Shards, StoredTensor
from tandem.model.tensors import HEAD, expected_tensors

__all__ = ["Checkpoint", "Progress", "Skipped", "TensorReader", "locate"]

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) as weights are read; the last call has both equal."""

_EMBEDDING = "embed_tokens.weight"
_SKIPPED = ("model.visual.", "mtp.")
_STORED_DTYPES: dict[str, DType] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_PATTERNS = ["*.json", "model*.safetensors", "*.jinja", "*.txt", "tokenizer*"]


def locate(path: str) -> tuple[Path, str]:
    """The folder and the name of a checkpoint: a local folder, or a hub id, which is downloaded unless cached.

    Raises:
        CheckpointError: neither a folder nor a hub id, or the hub cannot give it.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder, folder.resolve().name
    if not _HUB_ID.fullmatch(path):
        raise CheckpointError(f"{path} is neither a folder nor a hub id of the form owner/name")
    try:
        return Path(snapshot_download(path, allow_patterns=_HUB_PATTERNS)), path
    except (HfHubHTTPError, OSError, ValueError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{path} is no local folder and could not be fetched from the hub: {reason}") from error


@dataclass(frozen=True, slots=True)
class Skipped:
    """Tensors of the checkpoint that serving text does not need: the vision tower and the multi-token-prediction layer."""

    num_tensors: int
    num_bytes: int


@dataclass(frozen=True)
class Checkpoint:
    """tensors: what the architecture needs, by name without prefix; the output projection only where it is stored."""

    config: ModelConfig
    tensors: dict[str, StoredTensor]
    skipped: Skipped

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Read the config and the headers, and check every name and shape.

        Raises:
            CheckpointError: a tensor is missing, unexpected or of another shape than the config says; names it.
        """
        config = ModelConfig.from_folder(folder)
        stored = Shards.open(folder).tensors
        prefix = "model.language_model." if any(n.startswith("model.language_model.") for n in stored) else "model."
        expected = expected_tensors(config)
        skipped = [tensor for name, tensor in stored.items() if name.startswith(_SKIPPED)]
        found = {n.removeprefix(prefix): t for n, t in stored.items() if n.startswith(prefix) and not n.startswith(_SKIPPED)}
        found_head = stored.get(HEAD)
        others = [n for n in stored if n != HEAD and not n.startswith((prefix, *_SKIPPED))]
        if unexpected := sorted(others + [prefix + n for n in found if n not in expected]):
            raise CheckpointError(f"{folder}: unexpected {_named(unexpected)}")
        missing = [prefix + n for n in expected if n not in found]
        if found_head is None and not config.tied_embeddings:
            missing.append(HEAD)
        if missing:
            raise CheckpointError(f"{folder}: missing {_named(missing)}")
        if found_head is not None:
            found[HEAD] = found_head
            expected[HEAD] = expected[_EMBEDDING]
        for name, shape in expected.items():
            if found[name].shape != shape:
                full = name if name == HEAD else prefix + name
                raise CheckpointError(f"{folder}: {full} has shape {list(found[name].shape)}, the config says {list(shape)}")
        return cls(config, found, Skipped(len(skipped), sum(t.num_bytes for t in skipped)))

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    def stored_dtype(self) -> DType:
        """What "auto" serves in: the embedding's stored dtype.

        Raises:
            CheckpointError: it is none of fp32, bf16, fp16.
        """
        embedding = self.tensors[_EMBEDDING]
        if embedding.dtype not in _STORED_DTYPES:
            raise CheckpointError(
                f"{embedding.file}: weights of type {embedding.dtype} are not supported: use bf16, fp16 or fp32"
            )
        return _STORED_DTYPES[embedding.dtype]


def _named(names: Iterable[str], most: int = 3) -> str:
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return f"tensor{'s' if len(listed) > 1 else ''} {', '.join(listed[:most])}{more}"


@dataclass
class TensorReader:
    """Hands out a checkpoint's tensors one by one, in the serving dtype, hashing what was stored on the way.

    It is the model's `TakeTensor`; each tensor is handed out once.
    """

    checkpoint: Checkpoint
    dtype: DType
    progress: Progress | None = None
    _digests: dict[str, str] = field(default_factory=dict)
    _done_bytes: int = 0

    def __call__(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Raises:
        CheckpointError: the shard cannot be read.
        """
        stored = self.checkpoint.tensors[name]
        assert stored.shape == shape, f"{name}: {shape} asked for, {stored.shape} stored and checked"
        tensor = stored.read()
        self._digests[name] = _digest(tensor)
        self._done_bytes += stored.num_bytes
        if self.progress is not None:
            self.progress(self._done_bytes, self.checkpoint.num_bytes)
        return tensor.to(dtype or torch_dtype(self.dtype))

    def head(self, embedding_VN: torch.Tensor) -> torch.Tensor:
        """The output projection: as stored, else the embedding. Some tied checkpoints store an equal copy: one is kept."""
        if HEAD not in self.checkpoint.tensors:
            return embedding_VN
        head_VN = self(HEAD, *embedding_VN.shape)
        return embedding_VN if torch.equal(head_VN, embedding_VN) else head_VN

    def weights_digest(self) -> str:
        """Hex digest of every tensor's name, stored dtype, shape and bytes; the same however they are sharded."""
        assert self._digests.keys() == self.checkpoint.tensors.keys(), "the model left tensors unread"
        combined = xxhash.xxh3_128()
        for name, tensor in sorted(self.checkpoint.tensors.items()):
            combined.update(f"{name}|{tensor.dtype}|{tensor.shape}|{self._digests[name]}\n".encode())
        return combined.hexdigest()


def _digest(tensor: torch.Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(tensor.view(-1).view(torch.uint8).numpy().data)
