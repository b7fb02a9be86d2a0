"""Adapters are trained by the blockwise pass: gradients of plain autograd, whatever the dtype of the base, the
micro-batches, the saved blocks.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.weights import weight_store_for
from model import hf_format
from model.lora.adapter import adapters_of, add_adapters
from model.lora.form import LoraSettings
from model.quantization import dequantize
from model.t5 import T5
from tests.engine.small_models import (
    CUTS,
    Gradients,
    Rectangle,
    assert_near,
    autograd_gradients,
    blockwise_of,
    rectangle_gradients,
    relative_error,
    small_model,
)

FORMS = {
    "q,v": LoraSettings(3, 6.0),
    "three": LoraSettings(2, 4.0, ("q", "o", "wo")),
    "top": LoraSettings(2, 4.0, ("wi", "wi_1")),
}
BASES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8, "int4": torch.int4}


def adapted(family: str, base: str, form: str, folder: Path, dropout: float = 0.0, d_kv: int = 8) -> T5:
    """A small model whose adapters have moved from zero."""
    hf_format.save(small_model(family, d_kv=d_kv), folder)
    model = hf_format.load(folder, BASES[base])
    settings = FORMS[form]
    add_adapters(model, LoraSettings(**{**settings.__dict__, "dropout": dropout}), seed=3)
    generator = torch.Generator().manual_seed(9)
    for adapter in adapters_of(model).values():
        adapter.b.data.normal_(generator=generator).mul_(0.1)
    return model


def adapter_gradients(model: T5, base: str, saved: int, cut: str) -> Gradients:
    store = weight_store_for(BASES[base], torch.float32, (model.embedding, model.output_weight))
    return rectangle_gradients(blockwise_of(model, saved, store), Rectangle(), cut)


@pytest.mark.parametrize(
    ("family", "form", "base", "cut", "saved"),
    [
        ("t5", "q,v", "fp32", "one", 99),
        ("t5", "three", "bf16", "uneven", 0),
        ("t5-v1.1", "three", "int8", "uneven", 0),
        ("umt5", "top", "int4", "one", 0),
    ],
)
def test_gradients_equal_autograd(family: str, form: str, base: str, cut: str, saved: int, tmp_path: Path) -> None:
    model = adapted(family, base, form, tmp_path)
    oracle = model
    if base != "fp32":  # The oracle has the same base in fp32, each weight a plain matrix.
        oracle = T5(model.config)
        add_adapters(oracle, FORMS[form], seed=3)
        for name, weight in oracle.named_parameters():
            weight.data.copy_(dequantize(model.get_parameter(name), torch.float32))
    ours = adapter_gradients(model, base, saved, cut)
    assert_near(ours, autograd_gradients(oracle, Rectangle()), 2e-5, loss_tolerance=1e-5)
    assert all(".adapter." in name for name in ours[1])


@pytest.mark.parametrize(
    ("compiled", "cut", "base"), [(True, "one", "int4"), (False, "uneven", "int8")], indirect=["compiled"]
)
def test_dropout_of_adapters_does_not_depend_on_recompute_nor_if_compiled_on_micro_batches(
    compiled: bool, cut: str, base: str, tmp_path: Path
) -> None:
    model = adapted("t5", base, "three", tmp_path, dropout=0.4, d_kv=16)
    expected = adapter_gradients(model, base, 99, cut)
    assert_near(adapter_gradients(model, base, 0, "uneven"), expected, 2e-5)
    _, plain = adapter_gradients(adapted("t5", base, "three", tmp_path, d_kv=16), base, 99, cut)
    assert max(relative_error(plain[name], expected[1][name]) for name in plain) > 0.05, "dropout must do something"
    store = weight_store_for(BASES[base], torch.float32, (model.embedding, model.output_weight))
    micro_batches = Rectangle().micro_batches(model, CUTS["one"])
    evaluated = blockwise_of(model, 0, store).loss(micro_batches).item()
    model.adapter_dropout = 0.0
    assert evaluated == blockwise_of(model, 0, store).loss(micro_batches).item(), "evaluation never drops"
