"""Adapters: begin as the base, learn by the formula, come off and merge without a trace."""

from __future__ import annotations

import pytest
import torch

from model.dropout import NO_DROPOUT
from model.lora.adapter import LoraAdapter, adapters_of, adapters_off, add_adapters, merge
from model.lora.form import LoraSettings, resolve_targets
from model.quantization import quantize
from model.t5 import T5
from settings.declared import T5ModelConfig
from settings.errors import UserError

GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
FORMS = [
    LoraSettings(4, 8.0, ("q", "k", "v", "o", "wi", "wo")),
    LoraSettings(2, 4.0, ("q", "wo")),
]


def stir(model: T5) -> None:
    """Give the adapters values as if they had learned."""
    generator = torch.Generator().manual_seed(3)
    for adapter in adapters_of(model).values():
        adapter.b.data.normal_(generator=generator).mul_(0.3)


def logits(model: T5) -> torch.Tensor:
    ids = torch.arange(2, 22).view(2, 10)
    with torch.no_grad():
        return model.logits(ids, ids[:, :6])


@pytest.mark.parametrize("form", FORMS)
def test_begins_as_the_base(config: T5ModelConfig, form: LoraSettings) -> None:
    model = T5(config).initialise(1)
    before = logits(model)
    adapters = add_adapters(model, form, seed=5)
    torch.testing.assert_close(logits(model), before, rtol=1e-6, atol=1e-6)
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert trained == {f"{path}.adapter.{part}" for path, a in adapters.items() for part, _ in a.named_parameters()}
    assert all(adapter.a.abs().max() <= adapter.a.shape[1] ** -0.5 for adapter in adapters.values())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("as_int8", [False, True])
def test_one_matrix_by_the_formula_in_float64(form: LoraSettings, as_int8: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(*shape, generator=generator) for shape in ((7, 11), (13, 11)))
    weight = quantize(iter([w[:5], w[5:]]), 13, 11) if as_int8 else w
    wide = (weight.data.double() * weight.scale.double()[:, None]) if as_int8 else w.double()
    adapter = LoraAdapter(weight, form, 2)
    adapter.b.data.normal_(generator=generator)
    delta = wide + form.scaling * adapter.b.double() @ adapter.a.double()
    y = x @ wide.float().t()
    torch.testing.assert_close(adapter(x, y, NO_DROPOUT).double(), x.double() @ delta.t(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(adapter.merged(weight).double(), delta, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_merged_model_answers_as_the_adapted_one(config: T5ModelConfig, form: LoraSettings) -> None:
    model = T5(config).initialise(1)
    base = logits(model)
    add_adapters(model, form)
    stir(model)
    adapted = logits(model)
    assert (adapted - base).abs().max() > 0.01
    with adapters_off(model):
        assert torch.equal(logits(model), base)
    assert torch.equal(logits(model), adapted)
    merge(model)
    assert not adapters_of(model)
    torch.testing.assert_close(logits(model), adapted, rtol=1e-4, atol=1e-4)


def test_unknown_targets_list_those_that_exist(config: T5ModelConfig) -> None:
    with pytest.raises(UserError, match=r"wi_0, z is not a module.*allowed: q, k, v, o, wi, wo, or all"):
        resolve_targets(config, "q,wi_0,z")
