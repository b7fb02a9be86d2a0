"""int4: what is lost, by formulas in float64; levels, bytes and bits; products, gradients and memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from devices.kernels import build
from devices.kernels.calls import use
from devices.sizes import INT4_GROUP
from model import hf_format
from model.decoding.generation import generate
from model.int4 import LEVELS, Int4Weight, empty_int4, pack_into, unpack
from model.layers import Linear
from model.quantization import dequantize, is_int4, is_int8, product_back, shape_of
from model.shapes import is_block_matrix
from model.t5 import T5
from settings.declared import T5ModelConfig
from tests.measuring import in_child


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


def lost(matrix: torch.Tensor, result: torch.Tensor) -> float:
    return float((result.double() - matrix.double()).norm() / matrix.double().norm())


def nearest(groups: torch.Tensor, levels: tuple[float, ...], units: torch.Tensor) -> torch.Tensor:
    """Each number of the groups as the nearest level times its group's unit, in float64."""
    table = torch.tensor(levels, dtype=torch.float64)
    return table[(groups / units).unsqueeze(-1).sub(table).abs().argmin(-1)] * units


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


def test_rows_may_come_in_any_pieces_and_numbers_that_are_not_finite_stay_so(is_compiled: bool) -> None:
    matrix, whole = drawn(9, 128), empty_int4(9, 128)
    matrix[2, 3] = float("nan")
    pack_into(whole.data[:4], matrix[:4].bfloat16())
    pack_into(whole.data[4:], matrix[4:])
    assert torch.equal(whole.data[4:], packed(matrix).data[4:])
    result = unpack(whole.data, 128, torch.float32)
    assert result[2, :64].isnan().all() and result[2, 64:].isfinite().all() and result[3:].isfinite().all()


@pytest.mark.skipif(bool(build.why_impossible()), reason="no compiled kernels here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_kernels_give_the_bits_of_torch(dtype: torch.dtype) -> None:
    matrix, result = drawn(37, 512) * torch.logspace(-30, 30, 37)[:, None], []
    for is_used in (True, False):
        use(is_used)
        weight = packed(matrix).data
        result.append((weight, unpack(weight, 512, dtype)))
    use(True)
    assert all(torch.equal(*both) for both in zip(*result, strict=True))


@pytest.mark.parametrize(("rows", "columns"), [(96, 130), (33, 256)])
def test_products_and_gradients_are_those_of_the_widened_matrix(
    rows: int, columns: int, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert lost(grad.double() @ wide.double(), product_back(grad.bfloat16(), linear.weight)) < 0.01


def test_a_model_has_tables_in_int8_and_writes_as_its_widened_form(config: T5ModelConfig, tmp_path: Path) -> None:
    hf_format.save(T5(config).initialise(3), tmp_path)
    small, wide = hf_format.load(tmp_path, torch.int4), hf_format.load(tmp_path)
    for (name, weight), full in zip(small.named_parameters(), wide.parameters(), strict=True):
        if weight.dim() == 2 and weight.dtype != torch.float32:
            assert is_int4(weight) == is_block_matrix(name, full.shape) and (is_int4(weight) or is_int8(weight))
            full.data.copy_(dequantize(weight, torch.float32))
    rows = [[5, 6, 7, 1], [8, 9, 1]]
    answers = [generate(model, rows, max_new_tokens=12, compute_dtype=torch.float32) for model in (small, wide)]
    assert answers[0] == answers[1] and any(answers[0])


@pytest.mark.slow
def test_loading_as_int4_takes_about_half_a_byte_a_weight(tmp_path: Path) -> None:
    shape = T5ModelConfig(vocab_size=2048, d_model=512, num_layers=8, num_decoder_layers=8)
    hf_format.save(T5(shape).initialise(0), tmp_path)
    code = f"""
from model import hf_format
peak = measure(lambda: hf_format.load({str(tmp_path)!r}, torch.int4))
print(peak)
"""
    (peak,) = in_child(code)
    count = sum(weight.numel() for weight in T5(shape, "meta").parameters())
    assert peak < 0.56 * count + 12 * 2**20, f"{peak / count:.2f} bytes a weight"
