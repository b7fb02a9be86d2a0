"""Which of torch's fused attention kernels is taken on a GPU, and what does it compute?

The one that torch calls memory-efficient, by its own name: it takes a bias and gives its gradient, and with one split of
the keys its sums have one order. `scaled_dot_product_attention` chooses by itself, also cuDNN's kernel, which gives NaN
for some masks (pytorch 196678). Beside it the same in plain products, for a device without it: what the kernel is to give,
and what tests hold against the definition where there is no GPU.

Shapes: b rows, L queries, M keys, H heads, K d_kv; all tensors are (b, L or M, H, K).
Source: Rabe and Staats 2021 (arXiv 2112.05682), in the form of xFormers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from devices.base import traits_of

ALIGNED = 8  # numbers of a head, and keys, that the kernel reads at a time
NO_MASK_TYPE = 0  # causality stands in the bias


def takes_fused(q: Tensor) -> bool:
    """Whether fused kernels compute on this device and for heads of this width."""
    return traits_of(q.device).is_fused and q.shape[-1] % ALIGNED == 0


def fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, tuple[Any, ...]]:
    """softmax(q k^T + mask) v, and what the way back needs.

    Args:
        mask: (1 or b, 1 or H, 1 or L, M) in the dtype of q; M a multiple of 8.
    """
    if q.device.type == "cpu":
        weights = _weights(q, k, mask)
        return torch.einsum("bhlm,bmhk->blhk", weights, v), ()
    out, *state = torch.ops.aten._efficient_attention_forward(
        q, k, v, _spread(q, k, mask), None, None, q.shape[1], k.shape[1], 0.0, NO_MASK_TYPE, True, scale=1.0
    )
    return out, tuple(state[:3])


def fused_back(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, out: Tensor, state: tuple[Any, ...], has_dmask: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """The gradients of q, k, v and, where wanted, of the mask for each row: (b, H, L, M)."""
    if q.device.type == "cpu":
        return _by_products(grad, q, k, v, mask, has_dmask)
    logsumexp, seed, offset = state
    dq, dk, dv, dmask = torch.ops.aten._efficient_attention_backward(
        grad, q, k, v, _spread(q, k, mask), out, None, None, q.shape[1], k.shape[1], logsumexp, 0.0, seed, offset, NO_MASK_TYPE,
        has_dmask, scale=1.0, num_splits_key=1,
    )  # fmt: skip
    return dq, dk, dv, dmask if has_dmask else None


def _spread(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor | None:
    """The mask as if it were there for each row, head and query: a view."""
    return None if mask is None else mask.expand(len(q), q.shape[2], q.shape[1], k.shape[1])


def _weights(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    scores = torch.einsum("blhk,bmhk->bhlm", q, k)
    return (scores if mask is None else scores + mask).softmax(-1)


def _by_products(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, has_dmask: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    weights = _weights(q, k, mask)
    dweights = torch.einsum("blhk,bmhk->bhlm", grad, v)
    dscores = torch.ops.aten._softmax_backward_data(dweights, weights, -1, weights.dtype)
    return (
        torch.einsum("bhlm,bmhk->blhk", dscores, k),
        torch.einsum("bhlm,blhk->bmhk", dscores, q),
        torch.einsum("bhlm,blhk->bmhk", weights, grad),
        dscores if has_dmask else None,
    )
