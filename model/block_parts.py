"""What a block computes between its attentions, as functions of tensors alone: what torch compiles on a GPU.

A block of many small operations is limited there by their launches and by passes over memory; compiled, the operations between
two products are one kernel. Attention stays outside (`model.dense_attention`): it depends on how the rows of a step lie, these
functions on the number of tokens alone, so that one graph serves all steps.

What is dropped is a hash of a key and of the place in the tensor, not drawn by a generator: a block that is computed again drops
the same, whichever graph computes it, and backward forms the mask again instead of keeping it.

Shapes: N tokens, D d_model, I inner width of attention, F d_ff. Weights as in `model.layers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from devices.base import place
from devices.pointwise import mix_by_torch
from model.attention import attend
from model.dense_attention import DenseAttention
from model.dropout import Dropout, stride
from model.layers import joined_product
from model.rows import Rows

if TYPE_CHECKING:
    from model.t5 import Block

# Sites of dropout in a block, in the order of their keys.
BEHIND_LAST_ATTENTION, INSIDE_FEED_FORWARD, BEHIND_FEED_FORWARD, BEHIND_SELF_ATTENTION = range(4)
ENCODER_OFFSETS = (1, 3, 2, 1)
DECODER_OFFSETS = (5, 3, 2, 1)
# Of a hash of 32 bits with little bias. Source: "lowbias32", Wellons, github.com/skeeto/hash-prospector.
HASH_1 = 0x7FEB352D
HASH_2 = 0x846CA68B - 2**32


def place_dropout_keys(rows: Rows, blocks: Iterable[Block], device: torch.device) -> Tensor:
    """(blocks, 4, 2) int32 on the device: 64 bits for each site of each block."""
    assert rows.keys is not None, "dropout needs a key for every row"
    strides = torch.tensor(
        [
            [stride(block.site + offset + 1) for offset in (DECODER_OFFSETS if block.is_decoder else ENCODER_OFFSETS)]
            for block in blocks
        ]
    )
    keys = mix_by_torch(rows.keys[0] + strides)
    return place(keys.view(torch.int32).view(*strides.shape, 2), device)


def dropped(x: Tensor, keys: Tensor | None, number: int, rate: float) -> Tensor:
    """x (N, width) without a share `rate` of its elements, the others scaled; all of x without keys.

    Args:
        keys: (4, 2) int32, of the block. number: of the site.
    """
    if keys is None:
        return x
    rows = torch.arange(x.shape[0], device=x.device, dtype=torch.int32)
    columns = torch.arange(x.shape[1], device=x.device, dtype=torch.int32)
    bits = (rows[:, None] * x.shape[1] + columns) ^ keys[number, 0]
    bits = (bits ^ (bits >> 16 & 0xFFFF)) * HASH_1 ^ keys[number, 1]
    bits = (bits ^ (bits >> 15 & 0x1FFFF)) * HASH_2
    bits = bits ^ (bits >> 16 & 0xFFFF)
    threshold = round(rate * 2**32) - 2**31
    return torch.where(bits >= threshold, x * (1 / (1 - rate)), 0)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """`model.layers.RMSNorm`, computed in fp32."""
    wide = x.float()
    inverse = (wide.square().mean(1, keepdim=True) + epsilon).rsqrt()
    return (wide * inverse * weight).to(x.dtype)


def attention_input(
    x: Tensor, norm: Tensor, q: Tensor, k: Tensor, v: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values (N, I) of self-attention."""
    normed = rms_norm(x, norm, epsilon)
    return F.linear(normed, q), F.linear(normed, k), F.linear(normed, v)


def cross_attention_input(
    x: Tensor, attended: Tensor, o: Tensor, norm: Tensor, q: Tensor, keys: Tensor | None, rate: float, epsilon: float
) -> tuple[Tensor, Tensor]:
    """The residual stream (N, D) behind self-attention, and the queries (N, I) of cross-attention."""
    x = x + dropped(F.linear(attended, o), keys, BEHIND_SELF_ATTENTION, rate)
    return x, F.linear(rms_norm(x, norm, epsilon), q)


def feed_forward(
    x: Tensor,
    attended: Tensor,
    o: Tensor,
    norm: Tensor,
    gate: Tensor | None,
    wi: Tensor,
    wo: Tensor,
    keys: Tensor | None,
    rate: float,
    epsilon: float,
    activation: str,
    graph_only: bool,
) -> Tensor:
    """The block's output (N, D), from the stream before its last attention and what that gives (N, I).

    Args:
        graph_only: nothing reads the output: it lacks the last product.
    """
    x = x + dropped(F.linear(attended, o), keys, BEHIND_LAST_ATTENTION, rate)
    normed = rms_norm(x, norm, epsilon)
    inner = _activated(F.linear(normed, wi if gate is None else gate), activation)
    if gate is not None:
        inner = inner * F.linear(normed, wi)
    inner = dropped(inner, keys, INSIDE_FEED_FORWARD, rate)
    y: Tensor = _GraphOfProduct.apply(inner, wo) if graph_only else F.linear(inner, wo)
    return x + dropped(y, keys, BEHIND_FEED_FORWARD, rate)


def _activated(x: Tensor, activation: str) -> Tensor:
    if activation == "relu":
        return F.relu(x)
    return F.gelu(x, approximate="tanh") if activation == "gelu" else F.silu(x)


class _GraphOfProduct(torch.autograd.Function):
    """x W^T in backward, and zeros in forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.new_zeros(x.shape[0], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.T @ x


class BlockParts(NamedTuple):
    """The functions above, as they are or compiled."""

    attention_input: Callable[..., tuple[Tensor, Tensor, Tensor]] = attention_input
    cross_attention_input: Callable[..., tuple[Tensor, Tensor]] = cross_attention_input
    feed_forward: Callable[..., Tensor] = feed_forward


def run_block(
    parts: BlockParts,
    block: Block,
    x: Tensor,
    *,
    bias: Tensor | None,
    dropout: Dropout,
    keys: Tensor | None,
    encoder_output: Tensor | None = None,
    encoder_rows: Rows | None = None,
    graph_only: bool = False,
) -> Tensor:
    """`Block.forward` by these functions; of weights without adapters, in the dtype of x.

    Args:
        keys: (4, 2) of the block, as of `place_dropout_keys`; None: nothing is dropped.
    """
    rows = dropout.rows
    rate = dropout.rate
    drop = dropout.at(block.site)
    own = block.attention
    heads = own.heads
    bias = bias if block.bias is None else block.bias(rows.longest)
    norm = block.attention_norm
    q, k, v = parts.attention_input(x, norm.weight, own.q.weight, own.k.weight, own.v.weight, norm.epsilon)
    attended = attend(heads(q), heads(k), heads(v), bias, (rows, rows), block.is_decoder, drop).flatten(1)
    o = own.o.weight
    if block.is_decoder:
        assert encoder_output is not None and encoder_rows is not None
        cross = block.cross_attention
        norm = block.cross_norm
        x, q = parts.cross_attention_input(x, attended, o, norm.weight, cross.q.weight, keys, rate, norm.epsilon)
        sides = (rows, encoder_rows)
        joined = joined_product(encoder_output, (cross.k, cross.v))
        if joined is not None:
            attended = DenseAttention.apply(None, sides, False, drop.at(4), heads(q), heads(joined))
        else:
            k = cross.k(encoder_output)
            v = cross.v(encoder_output)
            attended = attend(heads(q), heads(k), heads(v), None, sides, False, drop.at(4))
        attended = attended.flatten(1)
        o = cross.o.weight
    norm = block.feed_forward_norm
    ff = block.feed_forward
    gate = None if ff.gate is None else ff.gate.weight
    constants = (rate, norm.epsilon, ff.activation, graph_only)
    return parts.feed_forward(x, attended, o, norm.weight, gate, ff.wi.weight, ff.wo.weight, keys, *constants)
