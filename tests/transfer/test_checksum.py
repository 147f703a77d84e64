"""The state checksum sees every byte of a slot, knows which layer it was, and does not mind the order of digesting."""

from __future__ import annotations

import torch

from tests.transfer.helpers import SPECS_STATE_LAYERS, fill, memory_of
from transfer.checksum import layer_digest, slot_checksum, state_checksum


def test_any_order_of_layers_gives_the_checksum_of_the_slot() -> None:
    memory = memory_of()
    fill(memory, seed=1)
    digests = {layer: layer_digest(memory, layer, 2) for layer in reversed(SPECS_STATE_LAYERS)}
    assert state_checksum(digests) == slot_checksum(memory, 2)


def test_every_byte_of_the_slot_counts_and_no_other() -> None:
    memory = memory_of()
    fill(memory, seed=1)
    before = slot_checksum(memory, 2)
    for tensors in (memory.conv, memory.recurrent):
        for tensor in tensors.values():
            view = tensor.view(torch.uint8).reshape(tensor.shape[0], -1)
            for position in range(view.shape[1]):
                view[2, position] ^= 1
                assert slot_checksum(memory, 2) != before
                view[2, position] ^= 1
            view[1] ^= 1
    for kv in memory.kv.values():
        kv.zero_()
    assert slot_checksum(memory, 2) == before


def test_states_of_exchanged_layers_are_not_the_same_state() -> None:
    memory = memory_of()
    fill(memory, seed=1)
    before = slot_checksum(memory, 2)
    for tensors in (memory.conv, memory.recurrent):
        tensors[0], tensors[1] = tensors[1], tensors[0]
    assert slot_checksum(memory, 2) != before
