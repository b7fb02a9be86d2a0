from __future__ import annotations

import dataclasses

import pytest
import torch

from model.dropout import Dropout
from model.layers import FeedForward, Linear, RMSNorm, adding_in_place
from model.rows import Rows
from settings.declared import T5ModelConfig


def test_norm_is_its_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    norm = RMSNorm(9, 1e-3)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(9, generator=generator))
    x = torch.randn(6, 9, generator=generator).requires_grad_()
    factor = torch.randn(6, 9, generator=generator)
    out = norm(x)
    (out * factor).sum().backward()

    wide_x, wide_weight = (t.detach().double().requires_grad_() for t in (x, norm.weight))
    expected = wide_weight * wide_x / (wide_x.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    (expected * factor).sum().backward()
    for ours, peer in ((out, expected), (x.grad, wide_x.grad), (norm.weight.grad, wide_weight.grad)):
        assert ours is not None and peer is not None
        torch.testing.assert_close(ours.double(), peer, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("activation", ["relu", "gated-gelu", "gated-silu"])
def test_feed_forward_is_its_formula(config: T5ModelConfig, activation: str) -> None:
    layer = FeedForward(dataclasses.replace(config, feed_forward_proj=activation))
    generator = torch.Generator().manual_seed(1)
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, generator=generator)
    x = torch.randn(5, config.d_model, generator=generator)
    inner = x @ layer.wi.weight.t()
    if activation == "relu":
        assert layer.gate is None
        inner = inner.clamp(min=0)
    else:
        assert layer.gate is not None
        gate = x @ layer.gate.weight.t()
        tanh_gelu = 0.5 * gate * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)))
        inner = inner * (tanh_gelu if activation == "gated-gelu" else gate * torch.sigmoid(gate))
    out = layer(x, Dropout(0.0, Rows((5,))))
    torch.testing.assert_close(out, inner @ layer.wo.weight.t(), rtol=1e-4, atol=1e-4)


def test_what_is_added_in_place_is_what_autograd_adds() -> None:
    generator = torch.Generator().manual_seed(0)
    x, factor = torch.randn(7, 5, generator=generator), torch.randn(7, 3, generator=generator)
    added, plain = Linear(5, 3), Linear(5, 3)
    for linear in (added, plain):
        torch.nn.init.ones_(linear.weight)
        (linear(x) * 2).sum().backward()
    address = added.weight.grad.data_ptr()
    with adding_in_place():
        (added(x) * factor).sum().backward()
    (plain(x) * factor).sum().backward()
    assert added.weight.grad.data_ptr() == address
    torch.testing.assert_close(added.weight.grad, plain.weight.grad)
