from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from config import T5ModelConfig
from model.dropout import Dropout
from model.layers import FeedForward, Linear, RMSNorm
from model.rows import Rows


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
    for ours, theirs in ((out, expected), (x.grad, wide_x.grad), (norm.weight.grad, wide_weight.grad)):
        assert ours is not None and theirs is not None
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-6)


def test_norm_epsilon_counts() -> None:
    x = torch.full((1, 4), 1e-3)
    torch.testing.assert_close(RMSNorm(4, 1e-6)(x), torch.full((1, 4), 0.5**0.5))


def test_norm_of_large_bf16_is_finite_and_near() -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)) * 1e15
    out = RMSNorm(64, 1e-6)(x.bfloat16())
    assert out.dtype == torch.bfloat16
    wide = x.double()
    torch.testing.assert_close(out.double(), wide / wide.square().mean(-1, keepdim=True).sqrt(), rtol=2e-2, atol=2e-2)


def test_linear_has_no_bias() -> None:
    linear = Linear(3, 2)
    torch.nn.init.ones_(linear.weight)
    assert [tuple(p.shape) for p in linear.parameters()] == [(2, 3)]
    assert torch.equal(linear(torch.ones(4, 3)), torch.full((4, 2), 3.0))


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


def test_feed_forward_drops_inside(config: T5ModelConfig) -> None:
    layer = FeedForward(config)
    for weight in layer.parameters():
        torch.nn.init.ones_(weight)
    x, dropout = torch.ones(5, config.d_model), Dropout(0.5, Rows((5,), torch.tensor([3])))
    inner = F.linear(x, layer.wi.weight) * dropout.kept(config.d_ff) * dropout.scale
    torch.testing.assert_close(layer(x, dropout), inner @ layer.wo.weight.t())
