"""The layers of a T5 block beside attention: RMS norm and feed-forward.

Shapes: N tokens of all rows end to end, D d_model, F d_ff.
Source: Raffel et al. 2020 (arXiv 1910.10683), section 2.1; gated activations: Shazeer 2020 (arXiv 2002.05202).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from devices.base import has_fused_attention, is_host
from devices.kernels.calls import kernels_for
from model.dropout import NO_DROPOUT, Dropout
from model.quantization import add_product, product, product_back
from model.shapes import is_gated
from settings.declared import T5ModelConfig

EXPONENT_BIAS = 127  # The exponent of an fp32 number is stored with so much added.
FP16_EXPONENT = 13  # Numbers stay below 2^13, an eighth of fp16's range: dropout and adapters need some.


def _rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """The norm of x (N, D), and what each token was multiplied by (N, 1)."""
    if compiled := kernels_for(x, weight):
        y, inverse = compiled.rms_norm(x, weight, epsilon)
        return y, inverse.unsqueeze(1)
    if has_fused_attention(x.device):
        # On "meta" autograd would take the operation apart before it can be counted.
        with torch._C._AutoDispatchBelowAutograd():
            y, inverse = torch.ops.aten._fused_rms_norm(x, [x.shape[-1]], weight.to(x.dtype), epsilon)
        return y, inverse.view(-1, 1)
    square = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).square_()
    inverse = square.div_(x.shape[-1]).add_(epsilon).rsqrt_()
    return (x * inverse.to(x.dtype)).mul_(weight.to(x.dtype)), inverse


class _RMSNorm(torch.autograd.Function):
    """y = w * x / sqrt(mean(x^2) + eps). Keeps x and one number a token, where autograd would keep three copies of
    x.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        y, inverse = _rms_norm(x, weight, epsilon)
        ctx.save_for_backward(x, weight, inverse)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        if compiled := kernels_for(grad, x, weight):
            dx, dweight = compiled.rms_norm_back(grad, x, weight, inverse)
            return dx, dweight.to(weight.dtype), None
        if has_fused_attention(x.device):
            wide = weight.to(x.dtype)
            dx, dweight = torch.ops.aten._fused_rms_norm_backward(grad, x, [x.shape[-1]], inverse, wide, [True, True])
            return dx, dweight.to(weight.dtype), None
        inverse = inverse.to(x.dtype)
        unit = x * inverse
        both = grad.float() * unit.float()
        grad_weight = both.sum(0).to(weight.dtype)
        dot = torch.mv(both, weight.to(both.dtype)).to(x.dtype).unsqueeze(1)
        del both
        dx = (grad * weight.to(x.dtype)).addcmul_(unit, dot, value=-1 / x.shape[-1]).mul_(inverse)
        return dx, grad_weight, None


class RMSNorm(nn.Module):
    """Scale each token to root mean square 1, then by a learned weight (D). No mean is subtracted, no bias added."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """x (N, D) -> (N, D) in `dtype`, or in that of x."""
        if torch.is_grad_enabled():
            y: Tensor = _RMSNorm.apply(x, self.weight, self.epsilon)
        else:  # A function of autograd costs more than the norm of a single token.
            y = _rms_norm(x, self.weight, self.epsilon)[0]
        return y.to(dtype or x.dtype)


_adds_in_place = False


@contextmanager
def adding_in_place() -> Iterator[None]:
    """Until the context ends, backward adds to the gradient that a matrix has as part of the product that forms its
    own.

    That saves a matrix of memory and three passes over it. Hooks of autograd do not see what is added so, hence only
    inside a blockwise pass, which has none. A flag of the module and not of the thread: on CUDA backward runs in a
    thread of torch.
    """
    global _adds_in_place
    before = _adds_in_place
    _adds_in_place = True
    try:
        yield
    finally:
        _adds_in_place = before


def as_one(parts: Sequence[Tensor], dim: int) -> Tensor | None:
    """A view of tensors that lie one behind the other along a dimension of one tensor in memory; None where they do
    not.
    """
    first = parts[0]
    width = 0
    for part in parts:
        is_next = part.storage_offset() == first.storage_offset() + width * first.stride(dim)
        if not is_next or part.stride() != first.stride() or _storage(part) != _storage(first):
            return None
        width += part.shape[dim]
    return first.as_strided((*first.shape[:dim], width, *first.shape[dim + 1 :]), first.stride())


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


class _Product(torch.autograd.Function):
    """x W^T, W being one matrix, or several that lie below each other in memory.

    Keeps W itself and not a view of it, so that a saved graph does not hold the wide copy of W.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, graph_only: bool, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x if weights[0].requires_grad else None, *weights)
        whole = _whole(weights)
        return x.new_zeros(()).expand(len(x), len(whole)) if graph_only else product(x, whole)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        needs_x, _, needs_weight, *_ = ctx.needs_input_grad
        grad_x = product_back(grad, _whole(weights)) if needs_x else None
        grad_weights: Sequence[Tensor | None] = [None] * len(weights)
        if needs_weight and _adds_in_place and all(w.is_leaf and w.grad is not None for w in weights):
            total = as_one([w.grad for w in weights], 0)
            totals = [w.grad for w in weights] if total is None else [total]
            for matrix, part in zip(totals, grad.split([len(matrix) for matrix in totals], 1), strict=True):
                add_product(matrix, part, x)
        elif needs_weight:
            whole = add_product(None, grad, x)
            # A view would be copied where autograd keeps it.
            grad_weights = [whole] if len(weights) == 1 else whole.split([len(w) for w in weights])
        return grad_x, None, *grad_weights


def trained_product(x: Tensor, *weights: Tensor, graph_only: bool = False) -> Tensor:
    """x W^T, differentiable in both, W being one matrix, or several that lie below each other in memory."""
    if not torch.is_grad_enabled():  # A function of autograd costs more than the product of a single token.
        return product(x, _whole(weights))
    return _Product.apply(x, graph_only, *weights)  # type: ignore[no-any-return,no-untyped-call]


def weight_gradient(weight: Tensor, grad: Tensor, x: Tensor) -> Tensor | None:
    """The gradient of W in the product x W^T; None where it needs none, or has been added to the one that it has."""
    if not weight.requires_grad:
        return None
    if _adds_in_place and weight.is_leaf and weight.grad is not None:
        add_product(weight.grad, grad, x)
        return None
    return add_product(None, grad, x)


def _whole(weights: Sequence[Tensor]) -> Tensor:
    whole = weights[0] if len(weights) == 1 else as_one(weights, 0)
    assert whole is not None, "these matrices were below each other"
    return whole


class Linear(nn.Module):
    """Matrix product without a bias; weight (width_out, width_in), as everywhere in T5.

    `adapter`, where there is one (see `model.lora.adapter`), changes the result: (x, result, dropout) -> result.
    """

    adapter: nn.Module | None

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width_out, width_in))
        self.register_module("adapter", None)

    def forward(self, x: Tensor, dropout: Dropout = NO_DROPOUT, graph_only: bool = False) -> Tensor:
        """x (N, width_in) -> (N, width_out); `dropout` is the adapter's.

        Args:
            graph_only: nothing reads the result, only backward passes through: zeros stand for it, without a product.
        """
        y = trained_product(x, self.weight, graph_only=graph_only)
        return y if self.adapter is None else self.adapter(x, y, dropout)


def joined_product(x: Tensor, linears: Sequence[Linear]) -> Tensor | None:
    """The products of x (N, m) with several matrices in one, their results beside each other.

    None where each goes its own way: on a CPU, where one product gains nothing; matrices with adapters, of another
    dtype than x, or that do not lie below each other in memory.
    """
    weights = [linear.weight for linear in linears]
    forms = {(linear.weight.dtype, linear.weight.requires_grad, linear.adapter) for linear in linears}
    if is_host(x) or forms != {(x.dtype, weights[0].requires_grad, None)} or as_one(weights, 0) is None:
        return None
    return trained_product(x, *weights)


class _Scaled(torch.autograd.Function):
    """x times `scale` (1,) fp32, in place both ways, as products that nothing else reads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        ctx.scale = scale
        return x.mul_(scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.mul_(ctx.scale), None


def residual_dtype(compute: torch.dtype) -> torch.dtype:
    """The dtype of the residual stream: fp32 where products are fp16, whose range it leaves."""
    return torch.float32 if compute == torch.float16 else compute


def fp16_scale(bound: Tensor, exponent: int = FP16_EXPONENT) -> tuple[Tensor, Tensor]:
    """The largest power of two, at most 1, that brings `bound` (1,) fp32 below 2^`exponent`, and its inverse.

    From the bits of its own exponent: exact, and on a GPU nothing waits for it.
    """
    biased = (2 * EXPONENT_BIAS - 1 + exponent - (bound.view(torch.int32) >> 23)).clamp_(1, EXPONENT_BIAS)
    return (biased << 23).view(torch.float32), (2 * EXPONENT_BIAS - biased << 23).view(torch.float32)


@torch.no_grad()
def _longest_row(x: Tensor) -> Tensor:
    """(1,) fp32: the largest L2 norm of the rows of a matrix, which none of its numbers exceeds."""
    return torch.linalg.vector_norm(x, dim=1, dtype=torch.float32).amax(0, keepdim=True)


class _Fp16Product(torch.autograd.Function):
    """x W^T times `factor` (1,) in fp32, of fp16 x and W, whatever the size of W: by W in rows no longer than 1.

    A number of that product is at most the norm of a row of x (Cauchy-Schwarz), and the gradient keeps its size on its
    way to x.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, factor: Tensor | None, graph_only: bool) -> Tensor:
        down, up = fp16_scale(_longest_row(weight), 0)
        factor = up if factor is None else up * factor
        ctx.save_for_backward(x if weight.requires_grad else None, weight, down, factor)
        if graph_only:
            return x.new_zeros((), dtype=torch.float32).expand(len(x), len(weight))
        return product(x, _fp16(weight, down)) * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight, down, factor = ctx.saved_tensors
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        grad = _fp16(grad, factor)
        grad_x = product_back(grad, _fp16(weight, down)) if needs_x else None
        return grad_x, add_product(None, grad, x).mul_(down) if needs_weight else None, None, None


def _fp16(x: Tensor, factor: Tensor) -> Tensor:
    """x times `factor` (1,) fp32, rounded once."""
    return torch.mul(x, factor, out=torch.empty_like(x, dtype=torch.float16))


def activated(x: Tensor, activation: str) -> Tensor:
    """The activation of a gate: silu, or GELU in the tanh form that the published checkpoints were trained with."""
    return F.gelu(x, approximate="tanh") if activation == "gelu" else F.silu(x)


class FeedForward(nn.Module):
    """wo(act(wi(x))), or wo(act(gate(x)) * wi(x)) where the activation is gated.

    In fp16 what `wo` reads and gives would overflow (transformers 9295, 5651): there it reads numbers that a power of
    two has brought into range, and gives fp32.
    """

    def __init__(self, config: T5ModelConfig) -> None:
        super().__init__()
        self.activation = config.feed_forward_proj.removeprefix("gated-")
        self.gate = Linear(config.d_model, config.d_ff) if is_gated(config) else None
        self.wi = Linear(config.d_model, config.d_ff)
        self.wo = Linear(config.d_ff, config.d_model)

    def forward(self, x: Tensor, dropout: Dropout, graph_only: bool = False) -> Tensor:
        """x (N, D) -> (N, D), by way of (N, F); of an fp16 x in fp32. `graph_only` as in `Linear`."""
        if x.dtype == torch.float16:
            return self._in_fp16(x, dropout, graph_only)
        if self.gate is None:
            inner = dropout.of_relu(self.wi(x, dropout.of_adapter(5)))
        else:
            gate = activated(self.gate(x, dropout.of_adapter(5)), self.activation)
            inner = dropout(gate * self.wi(x, dropout.of_adapter(6)))
        return self.wo(inner, dropout.of_adapter(7), graph_only)  # type: ignore[no-any-return]

    def _in_fp16(self, x: Tensor, dropout: Dropout, graph_only: bool) -> Tensor:
        if self.gate is None:
            inner = self.wi(x, dropout.of_adapter(5))
            scale, inverse = fp16_scale(_longest_row(inner))
            inner = dropout.of_relu(_Scaled.apply(inner, scale))
        else:
            inner = activated(self.gate(x, dropout.of_adapter(5)), self.activation)
            linear = self.wi(x, dropout.of_adapter(6))
            largest = torch.linalg.vector_norm(inner.detach(), torch.inf)
            scale, inverse = fp16_scale(_longest_row(linear) * largest)
            inner = dropout(_Scaled.apply(inner, scale) * linear)
        if self.wo.adapter is None:
            return _Fp16Product.apply(inner, self.wo.weight, inverse, graph_only)  # type: ignore[no-any-return]
        y = _Fp16Product.apply(inner, self.wo.weight, None, graph_only)
        return self.wo.adapter(inner, y, dropout.of_adapter(7)) * inverse  # type: ignore[no-any-return]
