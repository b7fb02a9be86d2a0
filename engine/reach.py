"""How far back does a step have to go, where parts of the model are frozen?

Backward ends at the lowest stage of a stack below which nothing learns: what lies further down runs forward only, keeps no
boundary and is visited once. The embedding lies below the first block of both stacks, a shared position bias is used in
every block of its own, and the encoder lies below every block of the decoder, by way of its cross-attention.
"""

from __future__ import annotations

from dataclasses import dataclass

from model.t5 import T5, Stack


@dataclass(frozen=True)
class Reach:
    """Where backward ends in one stack.

    Args:
        first: the lowest stage that backward visits; the number of stages (blocks and a final norm): none.
        entry: whether the gradient of the stack's input is wanted.
        is_needed: whether backward visits any stage.
    """

    first: int
    entry: bool
    is_needed: bool


def reach_of(model: T5) -> tuple[Reach, Reach]:
    """Where backward ends in the encoder and in the decoder."""
    embeds = model.embedding.requires_grad
    encoder = _reach(model.encoder, embeds, False)
    return encoder, _reach(model.decoder, embeds, encoder.is_needed)


def _reach(stack: Stack, entry: bool, is_whole: bool) -> Reach:
    """`is_whole`: something besides the entry needs the gradients of all blocks."""
    stages = [*stack.blocks, stack.final_norm]
    shares = stack.bias is not None and stack.bias.table.requires_grad
    trained = [index for index, stage in enumerate(stages) if any(w.requires_grad for w in stage.parameters())]
    first = 0 if entry or is_whole or shares else min(trained, default=len(stages))
    return Reach(first, entry, first < len(stages))
