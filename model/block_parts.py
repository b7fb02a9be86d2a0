"""What a block computes between its attentions, as functions of tensors alone: what torch compiles on a GPU.

A block of many small operations is limited there by their launches and by passes over memory; compiled, the operations
between two products are one kernel. Attention stays outside (`model.dense_attention`): it depends on how the rows of a
step lie, these functions on the number of tokens alone, so that one graph serves all steps.

What is dropped is a hash of a key and of the place in the tensor, not drawn by a generator: a block that is computed
again drops the same, whichever graph computes it, and backward forms the mask again instead of keeping it.

Shapes: N tokens, D d_model, I inner width of attention, F d_ff. Weights as in `model.layers`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from devices.base import place
from devices.pointwise import mix_by_torch
from model.attention import attend
from model.dense_attention import DenseAttention
from model.dropout import Dropout, stride
from model.layers import activated, joined_product, weight_gradient
from model.rows import Rows

if TYPE_CHECKING:
    from model.t5 import Block

# Sites of dropout in a block, in the order of their keys.
BEHIND_LAST_ATTENTION, INSIDE_FEED_FORWARD, BEHIND_FEED_FORWARD, BEHIND_SELF_ATTENTION = range(4)
ENCODER_OFFSETS = (1, 3, 2, 1)
DECODER_OFFSETS = (5, 3, 2, 1)
GELU_FACTOR = (2 / math.pi) ** 0.5
# The factors of a hash of 32 bits with little bias. Source: "lowbias32", Wellons, github.com/skeeto/hash-prospector.
HASH_1 = 0x7FEB352D
HASH_2 = 0x846CA68B - 2**32


def place_dropout_keys(rows: Rows, sites: Sequence[int], is_decoder: bool, device: torch.device) -> Tensor:
    """(blocks, 4, 2) int32 on the device: 64 bits for each of the four sites of each block, whose own sites are
    given.
    """
    assert rows.keys is not None, "dropout needs a key for every row"
    offsets = DECODER_OFFSETS if is_decoder else ENCODER_OFFSETS
    strides = torch.tensor([[stride(site + offset + 1) for offset in offsets] for site in sites])
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


def _normed(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """`model.layers.RMSNorm`, computed in fp32, and what each token was multiplied by: (N, 1)."""
    wide = x.float()
    inverse = (wide.square().mean(1, keepdim=True) + epsilon).rsqrt()
    return (wide * inverse * weight).to(x.dtype), inverse


def _norm_again(x: Tensor, weight: Tensor, inverse: Tensor) -> Tensor:
    return (x.float() * inverse * weight).to(x.dtype)


def _norm_back(grad: Tensor, x: Tensor, weight: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of the norm's input, in fp32, and of its weight."""
    unit = x.float() * inverse
    wide = grad.float()
    weighted = wide * weight
    dx = inverse * (weighted - unit * (weighted * unit).mean(1, keepdim=True))
    return dx, (wide * unit).sum(0)


def attention_input(
    x: Tensor, norm: Tensor, q: Tensor, k: Tensor, v: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys and values (N, I) of self-attention, and the norm's factors (N, 1)."""
    normed, inverse = _normed(x, norm, epsilon)
    return F.linear(normed, q), F.linear(normed, k), F.linear(normed, v), inverse


def attention_input_back(
    x: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, inverse: Tensor, norm: Tensor, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x and of the norm's weight, and the input of the three products."""
    dx, dnorm = _norm_back(dq @ q + dk @ k + dv @ v, x, norm, inverse)
    return dx.to(x.dtype), dnorm, _norm_again(x, norm, inverse)


def cross_attention_input(
    x: Tensor, attended: Tensor, o: Tensor, norm: Tensor, q: Tensor, keys: Tensor | None, rate: float, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The residual stream (N, D) behind self-attention, the queries (N, I) of cross-attention, the norm's factors (N,
    1).
    """
    stream = x + dropped(F.linear(attended, o), keys, BEHIND_SELF_ATTENTION, rate)
    normed, inverse = _normed(stream, norm, epsilon)
    return stream, F.linear(normed, q), inverse


def cross_attention_input_back(
    stream: Tensor,
    dstream: Tensor,
    dq: Tensor,
    inverse: Tensor,
    o: Tensor,
    norm: Tensor,
    q: Tensor,
    keys: Tensor | None,
    rate: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, of what attention gave and of the norm's weight; that of the product with `o`, and the input
    of that with `q`.
    """
    dnormed, dnorm = _norm_back(dq @ q, stream, norm, inverse)
    dx = (dstream.float() + dnormed).to(stream.dtype)
    dprojected = dropped(dx, keys, BEHIND_SELF_ATTENTION, rate)
    return dx, dprojected @ o, dnorm, dprojected, _norm_again(stream, norm, inverse)


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
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """The block's output (N, D), from the stream before its last attention and what that gives (N, I); and what
    backward reads: the stream (N, D), the norm's factors (N, 1), the products with `gate`, where there is one, and with
    `wi` (N, F).

    Args:
        graph_only: nothing reads the output: the stream stands for it.
    """
    stream = x + dropped(F.linear(attended, o), keys, BEHIND_LAST_ATTENTION, rate)
    normed, inverse = _normed(stream, norm, epsilon)
    gated = None if gate is None else F.linear(normed, gate)
    linear = F.linear(normed, wi)
    if graph_only:
        return stream, stream, inverse, gated, linear
    inner = dropped(_inner(gated, linear, activation), keys, INSIDE_FEED_FORWARD, rate)
    y = stream + dropped(F.linear(inner, wo), keys, BEHIND_FEED_FORWARD, rate)
    return y, stream, inverse, gated, linear


def feed_forward_back(
    stream: Tensor,
    dy: Tensor,
    inverse: Tensor,
    gated: Tensor | None,
    linear: Tensor,
    o: Tensor,
    norm: Tensor,
    gate: Tensor | None,
    wi: Tensor,
    wo: Tensor,
    keys: Tensor | None,
    rate: float,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor]:
    """The gradients of x, of what attention gave and of the norm's weight; those of the products with `o`, `gate`, `wi`
    and `wo` in this order with the input of both in the middle before those of `wi`; and the input of `wo`.
    """
    inner = dropped(_inner(gated, linear, activation), keys, INSIDE_FEED_FORWARD, rate)
    dproduct = dropped(dy, keys, BEHIND_FEED_FORWARD, rate)
    dinner = dropped(dproduct @ wo, keys, INSIDE_FEED_FORWARD, rate)
    dgated = None
    if gated is None or gate is None:
        dlinear = torch.where(linear > 0, dinner, 0)
        dnormed = dlinear @ wi
    else:
        dlinear = dinner * activated(gated, activation)
        dgated = (dinner.float() * linear.float() * _slope(gated.float(), activation)).to(linear.dtype)
        dnormed = dlinear @ wi + dgated @ gate
    of_norm, dnorm = _norm_back(dnormed, stream, norm, inverse)
    dx = (dy.float() + of_norm).to(stream.dtype)
    dprojected = dropped(dx, keys, BEHIND_LAST_ATTENTION, rate)
    normed = _norm_again(stream, norm, inverse)
    return dx, dprojected @ o, dnorm, dprojected, normed, dgated, dlinear, dproduct, inner


def _inner(gated: Tensor | None, linear: Tensor, activation: str) -> Tensor:
    return F.relu(linear) if gated is None else activated(gated, activation) * linear


def _slope(x: Tensor, activation: str) -> Tensor:
    """The derivative of an activation."""
    if activation == "gelu":
        tanh = torch.tanh(GELU_FACTOR * (x + 0.044715 * x**3))
        return 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh**2) * GELU_FACTOR * (1 + 3 * 0.044715 * x**2)
    share = torch.sigmoid(x)
    return share * (1 + x * (1 - share))


class BlockParts(NamedTuple):
    """The functions above, as they are or compiled."""

    attention_input: Callable[..., tuple[Tensor, ...]] = attention_input
    attention_input_back: Callable[..., tuple[Tensor, ...]] = attention_input_back
    cross_attention_input: Callable[..., tuple[Tensor, ...]] = cross_attention_input
    cross_attention_input_back: Callable[..., tuple[Tensor, ...]] = cross_attention_input_back
    feed_forward: Callable[..., tuple[Any, ...]] = feed_forward
    feed_forward_back: Callable[..., tuple[Any, ...]] = feed_forward_back


class _AttentionInput(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, parts: BlockParts, x: Tensor, norm: Tensor, q: Tensor, k: Tensor, v: Tensor, epsilon: float
    ) -> tuple[Tensor, ...]:
        *result, inverse = parts.attention_input(x.detach(), norm, q, k, v, epsilon)
        ctx.save_for_backward(x, inverse, norm, q, k, v)
        ctx.parts = parts
        return tuple(result)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, inverse, norm, q, k, v = ctx.saved_tensors
        dq, dk, dv = (grad.contiguous() for grad in grads)
        dx, dnorm, normed = ctx.parts.attention_input_back(x.detach(), dq, dk, dv, inverse, norm, q, k, v)
        products = [weight_gradient(weight, grad, normed) for weight, grad in ((q, dq), (k, dk), (v, dv))]
        return None, dx, dnorm, *products, None


class _CrossAttentionInput(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        parts: BlockParts,
        x: Tensor,
        attended: Tensor,
        o: Tensor,
        norm: Tensor,
        q: Tensor,
        keys: Tensor | None,
        rate: float,
        epsilon: float,
    ) -> tuple[Tensor, Tensor]:
        stream, queries, inverse = parts.cross_attention_input(
            x.detach(), attended.detach(), o, norm, q, keys, rate, epsilon
        )
        ctx.save_for_backward(attended, stream, inverse, o, norm, q, keys)
        ctx.arguments = parts, rate
        return stream, queries

    @staticmethod
    def backward(ctx: Any, dstream: Tensor, dq: Tensor) -> tuple[Any, ...]:
        attended, stream, inverse, o, norm, q, keys = ctx.saved_tensors
        parts, rate = ctx.arguments
        dq = dq.contiguous()
        dx, dattended, dnorm, dprojected, normed = parts.cross_attention_input_back(
            stream.detach(), dstream.contiguous(), dq, inverse, o, norm, q, keys, rate
        )
        do = weight_gradient(o, dprojected, attended)
        return None, dx, dattended, do, dnorm, weight_gradient(q, dq, normed), None, None, None


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        parts: BlockParts,
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
        constants = (rate, epsilon, activation, graph_only)
        y, *saved = parts.feed_forward(x.detach(), attended.detach(), o, norm, gate, wi, wo, keys, *constants)
        ctx.save_for_backward(attended, *saved, o, norm, gate, wi, wo, keys)
        ctx.arguments = parts, rate, activation
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        attended, stream, inverse, gated, linear, o, norm, gate, wi, wo, keys = ctx.saved_tensors
        parts, rate, activation = ctx.arguments
        saved = (inverse, gated, linear, o, norm, gate, wi, wo, keys)
        grads = parts.feed_forward_back(stream.detach(), dy.contiguous(), *saved, rate, activation)
        del saved, gated, linear, dy
        dx, dattended, dnorm, dprojected, normed, dgated, dlinear, dproduct, inner = grads
        del grads
        return (
            None,
            dx,
            dattended,
            weight_gradient(o, dprojected, attended),
            dnorm,
            None if gate is None else weight_gradient(gate, dgated, normed),
            weight_gradient(wi, dlinear, normed),
            weight_gradient(wo, dproduct, inner),
            *[None] * 5,
        )


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
    q, k, v = _AttentionInput.apply(parts, x, norm.weight, own.q.weight, own.k.weight, own.v.weight, norm.epsilon)
    attended = attend(heads(q), heads(k), heads(v), bias, (rows, rows), block.is_decoder, drop).flatten(1)
    o = own.o.weight
    if block.is_decoder:
        assert encoder_output is not None and encoder_rows is not None
        cross = block.cross_attention
        norm = block.cross_norm
        x, q = _CrossAttentionInput.apply(parts, x, attended, o, norm.weight, cross.q.weight, keys, rate, norm.epsilon)
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
    weights = (o, norm.weight, gate, ff.wi.weight, ff.wo.weight)
    result: Tensor = _FeedForward.apply(parts, x, attended, *weights, keys, *constants)
    return result
