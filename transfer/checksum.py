"""The checksum of one sequence's recurrent state, made layer by layer in any order."""

from __future__ import annotations

import struct

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from tandem.cache.memory import CacheMemory

__all__ = ["layer_digest", "slot_checksum", "state_checksum"]


def layer_digest(memory: CacheMemory, layer: int, slot: int) -> int:
    """xxh3_64 over the layer's convolution tail and then its recurrent matrix in `slot`."""
    digest = xxhash.xxh3_64()
    for tensor in (memory.conv[layer], memory.recurrent[layer]):
        digest.update(_bytes(tensor[slot]))
    return digest.intdigest()


def state_checksum(digests: dict[int, int]) -> int:
    """xxh3_64 over (layer, digest) pairs in layer order; the order in which the layers were digested does not matter."""
    packed = b"".join(struct.pack("<IQ", layer, digests[layer]) for layer in sorted(digests))
    return xxhash.xxh3_64_intdigest(packed)


def slot_checksum(memory: CacheMemory, slot: int) -> int:
    """The checksum of everything in one slot, as it lies there now."""
    return state_checksum({layer: layer_digest(memory, layer, slot) for layer in memory.recurrent})


def _bytes(item: torch.Tensor) -> memoryview:
    # On an accelerator this copies the item to the host: the price of knowing that it arrived whole.
    array: NDArray[np.uint8] = item.detach().cpu().contiguous().view(torch.uint8).numpy()
    return array.data
