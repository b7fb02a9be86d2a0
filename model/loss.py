"""The loss and its gradient, without ever holding all logits.

The only place where training logits exist: (C, V) for a chunk of C tokens at a time. Each chunk's gradient is formed at
once and added to the gradients of hidden states and head, so loss and gradient together cost one chunk.

Shapes: N target tokens, D d_model, V vocabulary, C tokens of a chunk.
Source: label smoothing: Szegedy et al. 2016.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from devices.base import is_host, traits_of
from devices.kernels.calls import kernels_for
from devices.sizes import LOSS_CHUNK_BYTES, loss_chunk_tokens
from model.quantization import add_product, product, product_back, rows_of

IGNORED = -100  # A label that carries no loss.
# From 32,768 numbers on torch gives each thread a part of a sum (at::internal::GRAIN_SIZE), so that its bits follow
# their count.
SUMMED_TOKENS = 32_767


@dataclass(frozen=True)
class LossSettings:
    """How the loss is formed.

    Args:
        chunk_bytes: most memory of one chunk of logits (C x V x 4 bytes).
        label_smoothing: share of the target spread over the vocabulary, 0 to 1.
    """

    chunk_bytes: int = LOSS_CHUNK_BYTES
    label_smoothing: float = 0.0


def count_labels(labels: Tensor) -> Tensor:
    """How many of these carry a loss: classes or tokens that are not IGNORED, or numbers that are not nan."""
    return (~labels.isnan() if labels.is_floating_point() else labels != IGNORED).sum()


def sum_of(losses: Tensor) -> Tensor:
    """The sum of token losses (N,), the same bits with any number of threads."""
    if not is_host(losses) or len(losses) <= SUMMED_TOKENS:
        return losses.sum()
    return torch.stack([part.sum() for part in losses.split(SUMMED_TOKENS)]).sum()


def _chunk(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    settings: LossSettings,
    scale: float | None,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Loss (C,) of each token, and scale * weight * d loss / d logits (C, V) in the dtype of hidden; without `scale` no
    such gradient is formed.
    """
    logits = product(hidden, head)
    if compiled := kernels_for(logits):
        return compiled.chunk_loss(logits, labels, weights, settings.label_smoothing, scale), logits
    wide = logits.float()
    del logits
    losses = _chunk_loss(wide, labels, settings, scale, weights)
    return losses, wide if scale is None else wide.to(hidden.dtype)


def _chunk_loss(
    logits: Tensor,
    labels: Tensor,
    settings: LossSettings,
    scale: float | None,
    weights: Tensor | None = None,
) -> Tensor:
    """Loss (C,) of each token from (C, V) fp32 logits, which are overwritten: with scale * weight * d loss / d logits,
    where `scale` is given. IGNORED labels and weights are in the loss.
    """
    counted = (labels != IGNORED).float()
    if weights is not None:
        counted = counted * weights
    target = labels.clamp(min=0).unsqueeze(1)
    smooth = settings.label_smoothing
    target_logits = logits.gather(1, target).squeeze(1)
    if smooth:
        target_logits = (1 - smooth) * target_logits + smooth * logits.mean(1)
    largest = logits.amax(1, keepdim=True)
    exponentials = logits.sub_(largest).exp_()
    mass = exponentials.sum(1, keepdim=True)
    losses = (largest + mass.log()).squeeze(1) - target_logits
    if scale is not None:
        factor = (counted * scale).unsqueeze(1)
        gradient = exponentials.mul_(factor / mass)
        if smooth:
            gradient.sub_(factor * (smooth / logits.shape[1]))
        gradient.scatter_add_(1, target, factor * (smooth - 1.0))
    return losses * counted


def loss_and_gradients(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    scale: float,
    settings: LossSettings,
    grad_head: Tensor | None,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sum the loss of all tokens and form its gradient times `scale`.

    Args:
        hidden: (N, D), what the head multiplies (T5 1.0's factor d_model^-0.5 already in it).
        head: (V, D); of another dtype than hidden it is widened in pieces, once a chunk and way.
        labels: (N,) int64, IGNORED carries no loss.
        scale: factor on the gradient, e.g. 1 / tokens of the effective batch.
        grad_head: (V, D), added to; None: the head is frozen. Gradients of rows in its place are added to theirs, where
            open.
        weights: (N,) fp32, any sign: factor on each token's loss and gradient; None: 1 for all.
    Returns:
        loss sum, each token by its weight (a fp32 scalar, not scaled) and the gradient of hidden (N, D).
    Memory: C x V x 4 bytes twice, and the gradient of hidden.
    """
    grad_hidden = torch.empty_like(hidden)
    total = hidden.new_zeros((), dtype=torch.float32)
    rows = rows_of(head)
    step = loss_chunk_tokens(settings.chunk_bytes, head.shape[0], traits_of(hidden.device).row_tile)
    for start in range(0, hidden.shape[0], step):
        chunk = hidden[start : start + step]
        part = None if weights is None else weights[start : start + step]
        losses, gradient = _chunk(chunk, head, labels[start : start + step], settings, scale, part)
        total += sum_of(losses)
        grad_hidden[start : start + step] = product_back(gradient, head)
        if grad_head is not None:
            add_product(grad_head, gradient, chunk)
        if rows is not None and rows[1].grad is not None:
            rows[1].grad += add_product(None, gradient[:, rows[0] : rows[0] + len(rows[1])], chunk)
        del gradient  # The next chunk's logits take its memory.
    return total, grad_hidden


def token_losses(hidden: Tensor, head: Tensor, labels: Tensor, settings: LossSettings) -> Tensor:
    """The loss of each token (N,), fp32, 0 where IGNORED: without smoothing the negative log-probability.

    Shapes and memory as `loss_and_gradients`, without gradients.
    """
    losses = hidden.new_empty(hidden.shape[0], dtype=torch.float32)
    step = loss_chunk_tokens(settings.chunk_bytes, head.shape[0], traits_of(hidden.device).row_tile)
    for start in range(0, hidden.shape[0], step):
        part = slice(start, start + step)
        losses[part] = _chunk(hidden[part], head, labels[part], settings, None)[0]
    return losses


class MeanLoss(torch.autograd.Function):
    """The mean loss over valid tokens as one autograd node, for users of `T5.forward`; arguments hidden, head, labels,
    settings.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, labels: Tensor, settings: LossSettings) -> Tensor:
        count = int((labels != IGNORED).sum())
        if not any(ctx.needs_input_grad):
            return token_losses(hidden, head, labels, settings).sum() / max(count, 1)
        grad_head = torch.zeros_like(head) if ctx.needs_input_grad[1] else None
        total, grad_hidden = loss_and_gradients(hidden, head, labels, 1 / max(count, 1), settings, grad_head)
        ctx.save_for_backward(grad_hidden, grad_head)
        return total / max(count, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        grad_hidden, grad_head = ctx.saved_tensors
        return grad_hidden * grad, None if grad_head is None else grad_head * grad, None, None
