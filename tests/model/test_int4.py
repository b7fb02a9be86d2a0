"""int4: what is lost, by formulas in float64; levels, bytes and bits; products, gradients and memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from devices.kernels import build
from devices.kernels.calls import use
from devices.sizes import INT4_GROUP
from model.int4 import LEVELS, Int4Weight, empty_int4, pack_into, unpack
from model.layers import Linear
from model.quantization import dequantize, shape_of


@pytest.fixture(params=[True, False], ids=["kernels", "torch"])
def is_compiled(request: pytest.FixtureRequest) -> Iterator[bool]:
    if request.param and build.why_impossible():
        pytest.skip("no compiled kernels here")
    use(request.param)
    yield request.param
    use(True)


def drawn(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def packed(matrix: torch.Tensor) -> Int4Weight:
    weight = empty_int4(*matrix.shape)
    pack_into(weight.data, matrix)
    return weight


@pytest.mark.parametrize("columns", [11, 512])
def test_each_group_is_within_its_bound(columns: int, is_compiled: bool) -> None:
    matrix = drawn(13, columns) * torch.logspace(-6, 6, 13)[:, None]
    matrix[4] = 0
    matrix[5, 1:] = 0
    matrix[6] = 3
    result = unpack(packed(matrix).data, columns, torch.float32)
    gap = max(high - low for low, high in zip((-1.0, *LEVELS[1:]), LEVELS[1:], strict=False)) / 2
    for start in range(0, columns, INT4_GROUP):
        part, ours = (x[:, start : start + INT4_GROUP].double() for x in (matrix, result))
        largest = part.abs().amax(1)
        # no number is further from its level than half the widest gap; the scale that fits best is no worse, but
        # rounded
        most = gap * part.shape[1] ** 0.5 * largest + 2**-8 * part.norm(dim=1)
        assert ((ours - part).norm(dim=1) <= most).all()
    assert not result[4].any() and torch.equal(result[5], matrix[5].bfloat16().float()), "zeros stay, a lone number too"
    torch.testing.assert_close(result[6], matrix[6], rtol=2**-8, atol=0)


@pytest.mark.skipif(bool(build.why_impossible()), reason="no compiled kernels here")
def test_compiled_kernels_give_the_bits_of_torch() -> None:
    matrix, result = drawn(37, 512) * torch.logspace(-30, 30, 37)[:, None], []
    for is_used in (True, False):
        use(is_used)
        weight = packed(matrix).data
        result.append((weight, unpack(weight, 512, torch.bfloat16)))
    use(True)
    assert all(torch.equal(*both) for both in zip(*result, strict=True))


def test_products_and_gradients_are_those_of_the_widened_matrix(
    is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, columns = 96, 130
    monkeypatch.setattr("model.quantization.WIDENED_ELEMENTS", 2048)
    monkeypatch.setattr("model.quantization.LEAST_WIDENED", 16)
    linear = Linear(columns, rows)
    linear.weight = packed(drawn(rows, columns))
    wide = dequantize(linear.weight, torch.float32)
    assert shape_of(linear.weight) == (rows, columns) == tuple(wide.shape)
    x, grad = drawn(7, columns, 1).requires_grad_(), drawn(7, rows, 2)
    y = linear(x)
    y.backward(grad)
    torch.testing.assert_close(y.double(), x.double() @ wide.double().t(), rtol=1e-5, atol=1e-5)
    assert x.grad is not None and linear.weight.grad is None
    torch.testing.assert_close(x.grad.double(), grad.double() @ wide.double(), rtol=1e-5, atol=1e-5)
