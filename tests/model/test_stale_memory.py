"""A sequence starts from zeros, whatever its blocks and its slot hold from before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.model.variants import Runner, Variant

MakeVariant = Callable[[str], Variant]


@pytest.mark.parametrize("length", [1, 2, 3, 4, 70])
def test_a_prompt_computed_again_over_its_own_half_done_state_gives_the_same_bits(
    length: int, variant: MakeVariant, tokens_500: list[int]
) -> None:
    loaded = variant("three value heads per key head").loaded
    want = Runner(loaded).logits(tokens_500[:length], split=32)
    again = Runner(loaded)
    again.logits(tokens_500[:37], split=20)  # an attempt that ended in the middle, in the same blocks and the same slot
    assert torch.equal(again.logits(tokens_500[:length], split=32), want)


def test_the_next_owner_of_a_slot_sees_nothing_of_the_last(variant: MakeVariant, tokens_500: list[int]) -> None:
    loaded = variant("uneven layers").loaded
    want = Runner(loaded).logits(tokens_500[200:260], split=60)
    shared = Runner(loaded)
    shared.logits(tokens_500[:150], split=150)
    assert torch.equal(shared.logits(tokens_500[200:260], split=60), want)
