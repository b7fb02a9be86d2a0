"""int8: each row within half a level, products by the formula, gradients of what flows through, folders and memory."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from model import hf_format
from model.formats.shape_file import read_config
from model.layers import Linear
from model.quantization import Int8Weight, dequantize, embed, is_int8, product, quantize
from model.t5 import T5
from settings.declared import T5ModelConfig
from tests.measuring import in_child
from tests.model.lora.test_adapter import GATED, logits


def random_matrix(n: int = 13, m: int = 11) -> torch.Tensor:
    return torch.randn(n, m, generator=torch.Generator().manual_seed(0))


def test_products_and_gradients_by_the_formula() -> None:
    weight = quantize(iter(random_matrix().split(4)), 13, 11)
    wide = weight.data.double() * weight.scale.double()[:, None]
    x = random_matrix(7, 11).requires_grad_()
    linear = Linear(11, 13)
    linear.weight = weight
    y = linear(x)
    torch.testing.assert_close(y.double(), x.double() @ wide.t(), rtol=1e-5, atol=1e-5)
    grad = random_matrix(7, 13)
    y.backward(grad)
    torch.testing.assert_close(x.grad.double(), grad.double() @ wide, rtol=1e-5, atol=1e-5)
    assert weight.grad is None and product(x.detach(), weight).equal(y.detach())
    torch.testing.assert_close(dequantize(weight, torch.float32).double(), wide, rtol=1e-6, atol=1e-7)
    ids = torch.tensor([3, 0, 3])
    assert torch.equal(embed(ids, weight, torch.float32), dequantize(weight, torch.float32)[ids])


def test_a_saved_graph_does_not_hold_the_wide_copy() -> None:
    linear = Linear(11, 13)
    linear.weight.data = random_matrix().bfloat16()
    tensors, x = linear.weight.data, random_matrix(7, 11).requires_grad_()
    copy = tensors.float()
    address = copy.data_ptr()
    linear.weight.data = copy
    y = linear(x)
    linear.weight.data = tensors
    saved = [t for t in y.grad_fn.saved_tensors if t is not None]
    assert all(t.data_ptr() != address for t in saved), "the graph must refer to the weight, not to its copy"


@pytest.mark.parametrize("changes", [{}, GATED])
def test_an_int8_folder_holds_a_byte_a_weight_and_answers_alike(
    config: T5ModelConfig, changes: dict, tmp_path: Path
) -> None:
    shape = dataclasses.replace(config, **changes)
    model = T5(shape).initialise(1)
    hf_format.save(model, tmp_path / "wide")
    small = hf_format.load(tmp_path / "wide", torch.int8)
    matrices = [weight for weight in small.parameters() if weight.dim() == 2 and is_int8(weight)]
    assert len(matrices) == sum(isinstance(m, Linear) for m in model.modules()) + (1 if model.head is None else 2)
    assert all(isinstance(weight, Int8Weight) for weight in matrices)
    hf_format.save(small, tmp_path / "int8")
    assert not (tmp_path / "int8" / "model.safetensors").exists(), "transformers would read nonsense"
    tensors = load_file(tmp_path / "int8" / "model.int8.safetensors")
    assert tensors["shared.weight"].dtype == torch.int8
    assert sum(t.nbytes for t in tensors.values()) < 0.5 * (tmp_path / "wide" / "model.safetensors").stat().st_size
    again = hf_format.load(tmp_path / "int8", torch.int8)
    widened = hf_format.load(tmp_path / "int8")
    assert read_config(tmp_path / "int8") == model.config and not is_int8(widened.embedding)
    torch.testing.assert_close(logits(again), logits(small), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits(widened), logits(small), rtol=1e-4, atol=1e-5)
    reference = logits(model)
    assert 1e-4 < float((logits(small) - reference).norm() / reference.norm()) < 0.05


@pytest.mark.slow
def test_loading_as_int8_takes_a_byte_a_weight(tmp_path: Path) -> None:
    shape = T5ModelConfig(vocab_size=32128, d_model=512, num_layers=4, num_decoder_layers=4)
    hf_format.save(T5(shape).initialise(0), tmp_path)
    code = f"""
from model import hf_format
peak = measure(lambda: hf_format.load({str(tmp_path)!r}, torch.int8))
print(peak)
"""
    (peak,) = in_child(code)
    count = sum(weight.numel() for weight in T5(shape, "meta").parameters())
    # measured 1.07 to 1.10 in 48 of 48: the place of one chunk, 4 MiB; scales and first calls of torch are the rest
    assert peak < 1.05 * count + 12 * 2**20, f"{peak / count:.2f} bytes a weight"


@pytest.mark.parametrize("rows", [9])
def test_products_widen_narrow_weights_in_pieces(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model.quantization.WIDENED_ELEMENTS", 44)  # 4 rows of 11: the last piece has one
    x = torch.randn(rows, 11, generator=torch.Generator().manual_seed(1))
    whole = random_matrix()
    for weight in (whole.bfloat16(), quantize(iter([whole]), 13, 11)):
        expected = x @ dequantize(weight, torch.float32).t()
        torch.testing.assert_close(product(x, weight), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(product(x, whole), x @ whole.t()), "a weight of the same dtype is used as it is"
