"""How is the RMS norm computed on a GPU, in as few kernels as can be?

CUDA has one kernel for it each way; elsewhere few plain operations do the same, which tests hold against the definition.

Shapes: N tokens, D d_model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from devices.base import traits_of


def takes_fused(x: Tensor) -> bool:
    """Whether torch has a kernel for the whole norm here; tests on the CPU take the plain operations."""
    return traits_of(x.device).is_fused and not x.is_cpu and x.dim() == 2


def fused_norm(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """The norm of x (N, D), and what each token was multiplied by (N, 1) fp32."""
    arguments = x, [x.shape[-1]], weight.to(x.dtype), epsilon
    if not x.is_meta:
        y, inverse = torch.ops.aten._fused_rms_norm(*arguments)
    else:  # where it would be taken apart before it can be counted
        with torch._C._AutoDispatchBelowAutograd():
            y, inverse = torch.ops.aten._fused_rms_norm(*arguments)
    return y, inverse.view(-1, 1)


def norm_back(grad: Tensor, x: Tensor, weight: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x (N, D) and of weight (D)."""
    if takes_fused(x):
        wide = weight.to(x.dtype)
        dx, dweight = torch.ops.aten._fused_rms_norm_backward(grad, x, [x.shape[-1]], inverse, wide, [True, True])
        return dx, dweight.to(weight.dtype)
    inverse = inverse.to(x.dtype)
    unit = x * inverse
    both = grad.float() * unit.float()
    dot = torch.mv(both, weight.to(both.dtype)).to(x.dtype).unsqueeze(1)
    dx = (grad * weight.to(x.dtype)).addcmul_(unit, dot, value=-1 / x.shape[-1]).mul_(inverse)
    return dx, both.sum(0).to(weight.dtype)
