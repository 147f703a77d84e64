"""The safetensors files of a checkpoint folder: headers first, then single tensors by name.

Format: 8 bytes little-endian header length, a JSON header `{name: {dtype, shape, data_offsets}}`, then the data, without
holes (https://github.com/huggingface/safetensors#format). It is read here directly, so that each tensor's bytes pass
through memory once, for loading and for the fingerprint together, and no mapping of the file outlives the load.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.errors import CheckpointError

if TYPE_CHECKING:
    import torch

__all__ = ["Shards", "StoredTensor"]

_DTYPES = {"F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2)}
_OTHER_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "I32": 4, "U32": 4}
_OTHER_BYTES |= {"I64": 8, "U64": 8}
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies. offset: of its first byte in `file`. dtype: safetensors' name."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    def read(self) -> torch.Tensor:
        """The tensor as stored, in memory of its own.

        Raises:
            CheckpointError: the stored dtype is not a floating type that tandem reads, or the file ends early.
        """
        if self.dtype not in _DTYPES:
            raise CheckpointError(
                f"{self.file}: tensors of type {self.dtype} are not supported: use bf16, fp16 or fp32 weights"
            )
        import torch  # here only: headers are looked at by processes that need no torch

        tensor = torch.empty(self.shape, dtype=getattr(torch, _DTYPES[self.dtype][0]))
        if not self.num_bytes:
            return tensor
        view = tensor.view(-1).view(torch.uint8).numpy().data
        try:
            with self.file.open("rb", buffering=0) as stream:
                stream.seek(self.offset)
                done = 0
                while done < self.num_bytes and (count := stream.readinto(view[done:])):
                    done += count
        except OSError as error:
            raise CheckpointError(f"{self.file} cannot be read: {error}") from error
        if done < self.num_bytes:
            raise CheckpointError(f"{self.file} ends early: it is truncated, fetch it again")
        return tensor


@dataclass(frozen=True)
class Shards:
    """Every tensor of a folder by its full name."""

    tensors: Mapping[str, StoredTensor]

    @classmethod
    def open(cls, folder: Path) -> Shards:
        """Read the headers of `model.safetensors`, or of the shards that `model.safetensors.index.json` names.

        Raises:
            CheckpointError: no weights, a shard that the index names is missing, or a file is truncated or malformed.
        """
        tensors: dict[str, StoredTensor] = {}
        for file, names in _files(folder):
            header = dict(_header(file))
            for name in names if names is not None else header:
                if name not in header:
                    raise CheckpointError(f"{file} lacks the tensor {name} that the index places there")
                tensors[name] = header[name]
        return cls(tensors)


def _files(folder: Path) -> Iterator[tuple[Path, list[str] | None]]:
    """Each file with the tensors that the index places in it; None: all that it holds."""
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if not index.is_file():
        if not single.is_file():
            raise CheckpointError(f"{folder} holds neither model.safetensors nor model.safetensors.index.json")
        yield single, None
        return
    by_file: dict[str, list[str]] = {}
    for name, file in _weight_map(index).items():
        by_file.setdefault(file, []).append(name)
    for file, names in sorted(by_file.items()):
        if not (folder / file).is_file():
            raise CheckpointError(f"{folder / file} is missing, though {index.name} names it: fetch the checkpoint again")
        yield folder / file, names


def _weight_map(index: Path) -> dict[str, str]:
    try:
        data = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{index} cannot be read as JSON: {error}") from error
    weight_map = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map")
    for file in weight_map.values():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{index} names a shard {file!r} that is not a file of this folder")
    return weight_map


def _header(file: Path) -> Iterator[tuple[str, StoredTensor]]:
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise CheckpointError(f"{file} is truncated or no safetensors file: fetch it again")
            header = json.loads(stream.read(length))
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{file} has a corrupt header: fetch it again") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file} has a corrupt header: fetch it again")
    header.pop("__metadata__", None)
    stored = [(name, _stored(file, name, entry, 8 + length)) for name, entry in header.items()]
    end = max((tensor.offset + tensor.num_bytes for _, tensor in stored), default=8 + length)
    if end != size:
        raise CheckpointError(f"{file} has {size:,} bytes where its header promises {end:,}: it is truncated, fetch it again")
    yield from stored


def _stored(file: Path, name: str, entry: Any, data_start: int) -> StoredTensor:
    try:
        dtype, shape = str(entry["dtype"]), tuple(int(n) for n in entry["shape"])
        begin, end = (int(n) for n in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file} has a corrupt header entry for {name}: fetch it again") from error
    item_bytes = _DTYPES[dtype][1] if dtype in _DTYPES else _OTHER_BYTES.get(dtype)
    sizes_fit = item_bytes is None or end - begin == math.prod(shape) * item_bytes
    if not 0 <= begin <= end or any(n < 0 for n in shape) or not sizes_fit:
        raise CheckpointError(f"{file} has a corrupt header entry for {name}: fetch it again")
    return StoredTensor(file, dtype, shape, data_start + begin, end - begin)
