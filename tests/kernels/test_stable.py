from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tandem.kernels import stable

PAIRS = [(stable.sigmoid, torch.sigmoid), (stable.silu, functional.silu), (stable.softplus, functional.softplus)]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=["sigmoid", "silu", "softplus"])
def test_values_are_those_of_torch_over_the_whole_range(ours: object, theirs: object) -> None:
    x = torch.cat([torch.linspace(-120, 120, 4001), torch.linspace(-1e-3, 1e-3, 11)])
    assert callable(ours)
    assert callable(theirs)
    torch.testing.assert_close(ours(x), theirs(x.double()).float(), rtol=2e-6, atol=1e-30)


@pytest.mark.parametrize("ours", [ours for ours, _ in PAIRS], ids=["sigmoid", "silu", "softplus"])
@pytest.mark.parametrize("width", [1, 6, 17, 48, 100])
def test_a_row_does_not_depend_on_the_rows_beside_it(ours: object, width: int) -> None:
    assert callable(ours)
    x = torch.randn(300, width, generator=torch.Generator().manual_seed(0)) * 4
    alone = torch.cat([ours(x[i : i + 1]) for i in range(300)])
    for count in (2, 7, 33, 300):
        assert torch.equal(ours(x[:count]), alone[:count])


def test_bf16_is_computed_in_fp32() -> None:
    x = torch.randn(64).bfloat16()
    assert torch.equal(stable.silu(x), stable.silu(x.float()))
