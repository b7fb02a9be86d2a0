"""Adapters: learn and are merged by the formula."""

from __future__ import annotations

import pytest
import torch

from model.dropout import NO_DROPOUT
from model.lora.adapter import LoraAdapter, adapters_of
from model.lora.form import LoraSettings
from model.quantization import quantize
from model.t5 import T5

GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
FORM = LoraSettings(4, 8.0, ("q", "k", "v", "o", "wi", "wo"))


def stir(model: T5) -> None:
    """Give the adapters values as if they had learned."""
    generator = torch.Generator().manual_seed(3)
    for adapter in adapters_of(model).values():
        adapter.b.data.normal_(generator=generator).mul_(0.3)


def logits(model: T5) -> torch.Tensor:
    ids = torch.arange(2, 22).view(2, 10)
    with torch.no_grad():
        return model.logits(ids, ids[:, :6])


@pytest.mark.parametrize("as_int8", [False, True])
def test_one_matrix_by_the_formula_in_float64(as_int8: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(*shape, generator=generator) for shape in ((7, 11), (13, 11)))
    weight = quantize(iter([w[:5], w[5:]]), 13, 11) if as_int8 else w
    wide = (weight.data.double() * weight.scale.double()[:, None]) if as_int8 else w.double()
    adapter = LoraAdapter(weight, FORM, 2)
    adapter.b.data.normal_(generator=generator)
    delta = wide + FORM.scaling * adapter.b.double() @ adapter.a.double()
    y = x @ wide.float().t()
    torch.testing.assert_close(adapter(x, y, NO_DROPOUT).double(), x.double() @ delta.t(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(adapter.merged(weight).double(), delta, rtol=1e-4, atol=1e-5)
