"""Adapters are trained by the blockwise pass: gradients of plain autograd, whatever the dtype of the base, the
micro-batches, the saved blocks.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.blockwise import Blockwise
from engine.optimizer_in_backward import OptimizerInBackward
from engine.optimizers import OPTIMIZERS, Step
from engine.weights import weight_store_for
from model import hf_format
from model.lora.adapter import adapters_of, add_adapters
from model.lora.form import LoraSettings
from model.loss import LossSettings
from model.quantization import dequantize
from model.t5 import T5
from tests.engine.small_models import Rectangle, autograd_gradients, relative_error, small_model

CUTS = {"one": [[0, 1, 2, 3]], "uneven": [[2], [0, 1, 3]]}
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


def blockwise_of(model: T5, base: str, saved: int) -> Blockwise:
    weight_store = weight_store_for(BASES[base], torch.float32, (model.embedding, model.output_weight))
    return Blockwise(model, saved, weight_store, LossSettings(), 0.0)


def gradients_of(model: T5, base: str, saved: int, cut: str, batch: Rectangle) -> dict[str, torch.Tensor]:
    blockwise_of(model, base, saved).gradients(batch.micro_batches(model, CUTS[cut]), batch.num_labels)
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    return gradients


@pytest.mark.parametrize(
    ("family", "form", "base", "cut", "saved"),
    [
        ("t5", "q,v", "fp32", "one", 99),
        ("t5", "three", "bf16", "uneven", 0),
        ("t5-v1.1", "three", "int8", "uneven", 0),
        ("umt5", "top", "int4", "one", 0),
        ("umt5", "q,v", "int8", "uneven", 99),
    ],
)
def test_gradients_equal_autograd(family: str, form: str, base: str, cut: str, saved: int, tmp_path: Path) -> None:
    batch = Rectangle()
    model = adapted(family, base, form, tmp_path)
    oracle = model
    if base != "fp32":  # the same base in fp32, a plain matrix each
        oracle, own = T5(model.config), dict(model.named_parameters())
        add_adapters(oracle, FORMS[form], seed=3)
        for name, weight in oracle.named_parameters():
            weight.data.copy_(dequantize(own[name], torch.float32))
    _, expected = autograd_gradients(oracle, batch)
    gradients = gradients_of(model, base, saved, cut, batch)
    assert set(gradients) == set(expected) and all(".adapter." in name for name in gradients)
    assert max(relative_error(gradients[name], expected[name]) for name in expected) < 2e-5


@pytest.mark.parametrize(
    ("compiled", "cut", "base"),
    [(True, "one", "fp32"), (False, "uneven", "int8"), (True, "one", "int4")],
    indirect=["compiled"],
)
def test_dropout_of_adapters_does_not_depend_on_recompute_nor_if_compiled_on_micro_batches(
    compiled: bool, cut: str, base: str, tmp_path: Path
) -> None:
    batch, model = Rectangle(), adapted("t5", base, "three", tmp_path, dropout=0.4, d_kv=16)
    reference = gradients_of(model, base, 99, cut, batch)
    again = gradients_of(model, base, 0, "uneven", batch)
    assert max(relative_error(again[name], reference[name]) for name in reference) < 2e-5
    plain = gradients_of(adapted("t5", base, "three", tmp_path, d_kv=16), base, 99, cut, batch)
    assert max(relative_error(plain[name], reference[name]) for name in reference) > 0.05, "dropout must do something"
    blockwise = blockwise_of(model, base, 0)
    losses = [blockwise.loss(batch.micro_batches(model, CUTS["one"])).item() for _ in range(2)]
    model.adapter_dropout = 0.0
    assert losses == [blockwise.loss(batch.micro_batches(model, CUTS["one"])).item()] * 2, "evaluation never drops"


def test_a_step_moves_adapters_alone(tmp_path: Path) -> None:
    base = "int8"
    model, batch = adapted("t5-v1.1", base, "q,v", tmp_path), Rectangle()
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    optimizer = OPTIMIZERS["adamw"](trained)
    update = OptimizerInBackward(optimizer)
    update.begin(Step(1, 1e-2))
    micro_batches = batch.micro_batches(model, CUTS["one"])
    update.finish(blockwise_of(model, base, 0).gradients(micro_batches, batch.num_labels, update))
    moved = {name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])}
    assert moved == set(trained) and all(weight.grad is None for weight in model.parameters())
    assert {key.rpartition("/")[0] for key in optimizer.state} == set(trained)
