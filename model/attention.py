"""T5's attention with its learned position bias, in memory linear in the length.

The bias depends only on the distance between key and query, so it is kept as one number per head and distance (H, R),
and expanded to a matrix only for short rows; the causal mask is the value -inf at positive distances. Compiled CPU
kernels process one row after the other, without padding (`model.compiled_attention`); elsewhere rows of similar length
are padded and processed together (`model.dense_attention`).

Shapes: N query tokens, H heads, K d_kv, R distances. Source: position buckets: Raffel et al. 2020, section 2.1.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from devices.base import is_host, place, traits_of
from devices.kernels.calls import kernels, kernels_for
from devices.sizes import KERNEL_WIDTHS
from model.compiled_attention import CompiledAttention
from model.dense_attention import BiasMatrix, DenseAttention
from model.dropout import Dropout
from model.layers import Linear, joined_product
from model.rows import Rows
from model.shapes import inner_width
from settings.declared import T5ModelConfig


def attends_compiled(d_kv: int, device: torch.device) -> bool:
    """Whether compiled kernels compute attention on a device: rows have no padding there, elsewhere they are dense."""
    return device.type == "cpu" and traits_of(device).is_host and d_kv in KERNEL_WIDTHS and kernels() is not None


def position_buckets(distances: Tensor, bidirectional: bool, num_buckets: int, max_distance: int) -> Tensor:
    """Map distances (key position - query position) to buckets: exact when near, logarithmic when far.

    Args:
        distances: (R,) int64.
    Returns:
        (R,) int64 in [0, num_buckets).
    """
    offset = torch.zeros_like(distances)
    if bidirectional:
        num_buckets //= 2
        offset = (distances > 0).long() * num_buckets
        distances = distances.abs()
    else:
        distances = (-distances).clamp(min=0)
    exact = num_buckets // 2
    # The published checkpoints were trained with this formula in fp32.
    ratio = torch.log(distances.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    far = (exact + (ratio * (num_buckets - exact)).long()).clamp(max=num_buckets - 1)
    return offset + torch.where(distances < exact, distances, far)


class _Lookup(torch.autograd.Function):
    """The rows `buckets` (R,) of a table (buckets, H), as (H, R) in fp32.

    The backward of an ordinary lookup would add gradients on a GPU in random order. Here the gradient of each table row
    is one sum over distances in a fixed order: `is_in_bucket` (buckets, R) is 1 where a distance belongs to a bucket.
    """

    @staticmethod
    def forward(ctx: Any, table: Tensor, buckets: Tensor, is_in_bucket: Tensor) -> Tensor:
        ctx.save_for_backward(is_in_bucket)
        ctx.dtype = table.dtype
        return table.float().index_select(0, buckets).t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (is_in_bucket,) = ctx.saved_tensors
        sums = (is_in_bucket * grad[:, None].float()).sum(2)  # (H, buckets)
        return sums.t().to(ctx.dtype), None, None


class PositionBias(nn.Module):
    """The learned bias: a table of one number per bucket and head."""

    def __init__(self, config: T5ModelConfig, bidirectional: bool) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(config.relative_attention_num_buckets, config.num_heads))
        self.bidirectional = bidirectional
        self.max_distance = config.relative_attention_max_distance
        self.d_kv = config.d_kv
        # On a GPU, kept from step to step: the longest row, and for its distances `buckets` and `is_in_bucket` as in
        # `_Lookup`, and the causal mask.
        self._buckets: tuple[int, Tensor, Tensor, Tensor] | None = None

    def forward(self, longest: int) -> Tensor:
        """The bias for rows of at most `longest` tokens, in fp32, with the causal mask of a decoder.

        Returns:
            a matrix (H, longest, longest) where compiled kernels are not used and the matrix has at most as many
            elements as attention scores are computed at a time; else (H, 2 longest - 1), as of `over_distances`.
        """
        bias = self.over_distances(longest)
        is_small = len(bias) * longest**2 <= traits_of(bias.device).score_elements
        if attends_compiled(self.d_kv, bias.device) or not is_small:
            return bias
        return BiasMatrix.apply(bias, longest)  # type: ignore[no-any-return,no-untyped-call]

    def over_distances(self, longest: int) -> Tensor:
        """The bias of each distance from -(longest - 1) to longest - 1: (H, 2 longest - 1), fp32."""
        if not is_host(self.table):
            return self._on_gpu(longest)
        distances = torch.arange(1 - longest, longest, device=self.table.device)
        buckets = position_buckets(distances, self.bidirectional, self.table.shape[0], self.max_distance)
        bias = self.table.float()[buckets].t()  # (H, R)
        return bias if self.bidirectional else bias.masked_fill(distances > 0, -math.inf)

    def place_buckets(self, longest: int) -> None:
        """Compute the buckets of all distances on the host and send them to the GPU, unless those of the last step fit.

        They fit if `longest` is the same, but are empty if a pass failed inside `devices.base.placed_together` before
        they were copied.
        """
        is_current = self._buckets is not None and self._buckets[0] == longest and len(self._buckets[1]) > 0
        if not is_current:
            distances = torch.arange(1 - longest, longest)
            count = self.table.shape[0]
            buckets = position_buckets(distances, self.bidirectional, count, self.max_distance)
            is_in_bucket = (buckets == torch.arange(count)[:, None]).float()  # (buckets, R)
            mask = torch.zeros(len(distances)) if self.bidirectional else torch.where(distances > 0, -math.inf, 0.0)
            device = self.table.device
            self._buckets = longest, place(buckets, device), place(is_in_bucket, device), place(mask, device)

    def _on_gpu(self, longest: int) -> Tensor:
        self.place_buckets(longest)
        assert self._buckets is not None
        _, buckets, is_in_bucket, mask = self._buckets
        bias: Tensor = _Lookup.apply(self.table, buckets, is_in_bucket)
        return bias + mask


def attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, rows: tuple[Rows, Rows], causal: bool, dropout: Dropout
) -> Tensor:
    """softmax(q k^T + bias) v of each row by itself; T5 does not scale the scores.

    Args:
        q: (N, H, K) of the query rows; k, v: (N', H, K) of the key rows.
        bias: (H, R), one number per distance, distance 0 in the middle, R odd and at least 2 longest - 1; or, if rows
            are dense, a matrix (H, L, L) for rows of at most L tokens; or None, in cross-attention.
        rows: the layouts of queries and of keys.
        causal: whether bias holds -inf at positive distances, so that those keys need not be computed.
        dropout: of the attention weights.
    Returns:
        (N, H, K).
    """
    if not rows[0].groups and q.shape[2] in KERNEL_WIDTHS and kernels_for(q, k, v):
        return CompiledAttention.apply(q, k, v, bias, rows, causal, dropout)  # type: ignore[no-any-return]
    return DenseAttention.apply(bias, rows, causal, dropout, q, k, v)  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Multi-head attention of T5: four projections without bias vectors; H K may differ from D."""

    def __init__(self, config: T5ModelConfig) -> None:
        super().__init__()
        inner = inner_width(config)
        self.num_heads = config.num_heads
        self.d_kv = config.d_kv
        self.q = Linear(config.d_model, inner)
        self.k = Linear(config.d_model, inner)
        self.v = Linear(config.d_model, inner)
        self.o = Linear(inner, config.d_model)

    def allocate_joined_qkv(self, device: torch.device | str, dtype: torch.dtype) -> set[nn.Parameter]:
        """Allocate the weights of q, k and v as views of one tensor, so that one product computes all three
        (`joined_product`). Returns these weights, which are not initialized.
        """
        inner, width = self.q.weight.shape
        joined = torch.empty(3 * inner, width, device=device, dtype=dtype)
        for linear, part in zip((self.q, self.k, self.v), joined.chunk(3), strict=True):
            linear.weight = nn.Parameter(part)
        return {self.q.weight, self.k.weight, self.v.weight}

    def heads(self, x: Tensor) -> Tensor:
        """View (N, H K) as (N, H, K), and a joined product of q, k and v (N, 3 H K) as (N, 3 H, K)."""
        return x.view(len(x), -1, self.d_kv)

    def forward(
        self, x: Tensor, source: Tensor, bias: Tensor | None, rows: tuple[Rows, Rows], causal: bool, dropout: Dropout
    ) -> Tensor:
        """Attention with queries from x (N, D) and keys and values from source (N', D): (N, D).

        In self-attention x is source. The number given to `dropout.of_adapter` tells the four projections apart.
        """
        # q, k and v in one product, or k and v in cross-attention; None: one product each.
        joined = joined_product(source, (self.q, self.k, self.v) if x is source else (self.k, self.v))
        if joined is not None:
            packed = [self.heads(joined)] if x is source else [self.heads(self.q(x)), self.heads(joined)]
            out: Tensor = DenseAttention.apply(bias, rows, causal, dropout, *packed)
        else:
            q = self.heads(self.q(x, dropout.of_adapter(0)))
            k = self.heads(self.k(source, dropout.of_adapter(1, rows[1])))
            v = self.heads(self.v(source, dropout.of_adapter(2, rows[1])))
            out = attend(q, k, v, bias, rows, causal, dropout)
        return self.o(out.reshape(-1, self.num_heads * self.d_kv), dropout.of_adapter(3))
