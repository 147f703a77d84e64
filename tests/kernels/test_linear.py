from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tandem.kernels.linear import CpuLinear, CpuSwiglu

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def layer(features_in: int, features_out: int, dtype: torch.dtype) -> tuple[torch.Tensor, CpuLinear]:
    torch.manual_seed(0)
    weight = (torch.randn(features_out, features_in) * features_in**-0.5).to(dtype)
    return weight, CpuLinear(weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 33, 70])
@pytest.mark.parametrize("shape", [(48, 40), (1100, 33)])
def test_it_is_a_linear_layer_with_an_optional_residual(shape: tuple[int, int], rows: int, dtype: torch.dtype) -> None:
    weight, linear = layer(*shape, dtype)
    x, residual = torch.randn(rows, shape[0]).to(dtype), torch.randn(rows, shape[1]).to(dtype)
    want = x.double() @ weight.double().T
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for stable_rows in (False, True):
        torch.testing.assert_close(linear(x, stable_rows=stable_rows), want.to(dtype), **close)
        torch.testing.assert_close(linear(x, residual, stable_rows=stable_rows), (want + residual.double()).to(dtype), **close)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 40), (768, 520), (1100, 64), (3072, 33), (8192, 40), (9000, 40)])
@pytest.mark.parametrize("with_residual", [False, True])
def test_stable_rows_do_not_depend_on_the_rows_beside_them(
    shape: tuple[int, int], dtype: torch.dtype, with_residual: bool
) -> None:
    _, linear = layer(*shape, dtype)
    if not linear.is_packed:
        pytest.skip("packing is unavailable for this dtype here")
    x = torch.randn(100, shape[0]).to(dtype)
    residual = torch.randn(100, shape[1]).to(dtype) if with_residual else None

    def run(rows: slice) -> torch.Tensor:
        return linear(x[rows].clone(), None if residual is None else residual[rows].clone(), stable_rows=True)

    alone = torch.cat([run(slice(i, i + 1)) for i in range(100)])
    for count in (2, 3, 8, 16, 31, 32, 33, 64, 100):
        assert torch.equal(run(slice(0, count)), alone[:count]), count
        assert torch.equal(run(slice(100 - count, 100)), alone[100 - count :]), count


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_swiglu_is_its_formula(rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate, up = ((torch.randn(40, 48) * 48**-0.5).to(dtype) for _ in range(2))
    x = torch.randn(rows, 48).to(dtype)
    want = functional.silu(x.double() @ gate.double().T) * (x.double() @ up.double().T)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    for stable_rows in (False, True):
        got = CpuSwiglu(gate, up)(x, stable_rows=stable_rows)
        torch.testing.assert_close(got, want.to(dtype), rtol=tolerance, atol=tolerance)


def test_without_packing_it_still_computes(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def unavailable(*_args: object) -> None:
        raise RuntimeError("no oneDNN here\nbacktrace")

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", unavailable)
    weight, linear = layer(48, 40, torch.float32)
    assert not linear.is_packed
    assert "no oneDNN here" in caplog.text
    assert "backtrace" not in caplog.text
    x, residual = torch.randn(3, 48), torch.randn(3, 40)
    torch.testing.assert_close(linear(x, residual), x @ weight.T + residual)
    product = x @ weight.T
    torch.testing.assert_close(CpuSwiglu(weight, weight)(x), functional.silu(product) * product)
