"""Which layers does a T5 block have beside attention? RMS norm and feed-forward.

Shapes: N tokens of all rows end to end, D d_model, F d_ff.
Source: Raffel et al. 2020 (arXiv 1910.10683), section 2.1; gated activations: Shazeer 2020 (arXiv 2002.05202).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config import T5ModelConfig
from model.dropout import Dropout


class _RMSNorm(torch.autograd.Function):
    """y = w * x / sqrt(mean(x^2) + eps). Keeps x and one number a token, where autograd would keep three copies of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        square = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).square_()
        inverse = square.div_(x.shape[-1]).add_(epsilon).rsqrt_()  # (N, 1)
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse.to(x.dtype)).mul_(weight.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        inverse = inverse.to(x.dtype)
        unit = x * inverse
        grad_weight = torch.linalg.vecdot(grad.float(), unit.float(), dim=0).to(weight.dtype)
        scaled = grad * weight.to(x.dtype)
        mean = torch.linalg.vecdot(scaled.float(), unit.float(), dim=-1).div_(x.shape[-1]).unsqueeze(-1).to(x.dtype)
        return scaled.sub_(unit.mul_(mean)).mul_(inverse), grad_weight, None


class RMSNorm(nn.Module):
    """Scale each token to root mean square 1, then by a learned weight (D). No mean is subtracted, no bias added."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """x (N, D) -> (N, D)."""
        return _RMSNorm.apply(x, self.weight, self.epsilon)


class Linear(nn.Module):
    """Matrix product without a bias; weight (width_out, width_in), as everywhere in T5."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width_out, width_in))

    def forward(self, x: Tensor) -> Tensor:
        """x (N, width_in) -> (N, width_out)."""
        return F.linear(x, self.weight)


class FeedForward(nn.Module):
    """wo(act(wi(x))), or wo(act(gate(x)) * wi(x)) where the activation is gated."""

    def __init__(self, config: T5ModelConfig) -> None:
        super().__init__()
        self.activation = config.feed_forward_proj.removeprefix("gated-")
        self.gate = Linear(config.d_model, config.d_ff) if config.feed_forward_proj.startswith("gated-") else None
        self.wi = Linear(config.d_model, config.d_ff)
        self.wo = Linear(config.d_ff, config.d_model)

    def forward(self, x: Tensor, dropout: Dropout) -> Tensor:
        """x (N, D) -> (N, D), by way of (N, F)."""
        inner = self._activate(x) if self.gate is None else self._activate(x) * self.wi(x)
        return self.wo(dropout(inner))

    def _activate(self, x: Tensor) -> Tensor:
        x = (self.gate or self.wi)(x)
        if self.activation == "relu":
            return F.relu(x)
        # the published checkpoints were trained with the tanh form of GELU
        return F.gelu(x, approximate="tanh") if self.activation == "gelu" else F.silu(x)
