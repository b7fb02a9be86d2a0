"""Backward range: how far back does a step have to go, where parts of the model are frozen?

Backward ends at the lowest stage of a stack below which nothing learns: what lies further down runs forward only, has no
checkpointed activations and runs once. The embedding lies below the first block of both stacks, a shared position bias is used in
every block of its own, and the encoder lies below every block of the decoder, by way of its cross-attention.
"""

from __future__ import annotations

from dataclasses import dataclass

from model.t5 import T5, Stack


@dataclass(frozen=True)
class BackwardRange:
    """Where backward ends in one stack.

    Args:
        first: the lowest stage that backward runs; the number of stages (blocks and a final norm): none.
        entry: whether the gradient of the stack's input is wanted.
        is_needed: whether backward runs any stage.
    """

    first: int
    entry: bool
    is_needed: bool


def backward_ranges(model: T5) -> tuple[BackwardRange, BackwardRange]:
    """Where backward ends in the encoder and in the decoder."""
    embeds = model.embedding.requires_grad
    encoder = _backward_range(model.encoder, embeds, False)
    return encoder, _backward_range(model.decoder, embeds, encoder.is_needed)


def _backward_range(stack: Stack, entry: bool, is_whole: bool) -> BackwardRange:
    """`is_whole`: something besides the entry needs the gradients of all blocks."""
    stages = [*stack.blocks, stack.final_norm]
    shares = stack.bias is not None and stack.bias.table.requires_grad
    trained = [index for index, stage in enumerate(stages) if any(w.requires_grad for w in stage.parameters())]
    first = 0 if entry or is_whole or shares else min(trained, default=len(stages))
    return BackwardRange(first, entry, first < len(stages))
