"""The order in which a pass needs the weights of a model.

    forward:   embedding -> the encoder's blocks -> its norm -> embedding -> the decoder's blocks -> its norm -> head
    backward:  the decoder's stages from its norm down to where nothing below learns, the encoder's likewise; last the
               shared weights, whose gradients gather on the way

Backward ends at the lowest stage of a stack below which nothing learns: what lies further down runs forward only, has no
checkpointed activations and runs once. The embedding lies below the first block of both stacks, a shared position bias is
used in every block of its own, and the encoder lies below every block of the decoder, by way of its cross-attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from engine.gradient_checkpointing import BlockFunction
from model.dropout import Dropout
from model.t5 import T5, Stack


class Stage:
    """A block, or the norm after the last one, which is as good as a block.

    Args:
        number: of the block, counted over both stacks. output_scale: factor on what the norm gives.
    """

    def __init__(self, stack: Stack, module: nn.Module, number: int, output_scale: float | None = None) -> None:
        self.stack, self.module, self.number, self.output_scale = stack, module, number, output_scale
        self.weights = list(module.parameters())
        self.is_norm = module is stack.final_norm

    def function(self, inputs: Mapping[str, Any]) -> BlockFunction:
        """The block with everything but its input given."""
        return partial(self._norm, dropout=inputs["dropout"]) if self.is_norm else partial(self.module, **inputs)

    def _norm(self, x: Tensor, dropout: Dropout, *, graph_only: bool = False) -> Tensor:
        left = self.stack.leave(x, dropout, graph_only=graph_only)
        return left if self.output_scale is None else left * self.output_scale


class StackSchedule:
    """The stages of one stack.

    Args:
        model: whose stack it is. entry_learns: whether the gradient of the stack's input is wanted.
        all_learn: whether something besides the input needs the gradients of all blocks.
    """

    def __init__(self, model: T5, is_decoder: bool, entry_learns: bool, all_learn: bool) -> None:
        self.is_decoder, self.entry_learns = is_decoder, entry_learns
        self.stack = stack = model.decoder if is_decoder else model.encoder
        number, scale = (len(model.encoder.blocks), model.output_scale) if is_decoder else (0, None)
        modules = [*stack.blocks, stack.final_norm]
        self.stages = [Stage(stack, module, number + index, scale) for index, module in enumerate(modules)]
        bias_learns = stack.bias is not None and stack.bias.table.requires_grad
        learning = [i for i, stage in enumerate(self.stages) if any(w.requires_grad for w in stage.weights)]
        # the lowest stage that backward runs; the number of stages: none
        self.first_learning = 0 if entry_learns or all_learn or bias_learns else min(learning, default=len(self.stages))

    @property
    def learning(self) -> list[Stage]:
        """The stages that backward runs, in forward order."""
        return self.stages[self.first_learning :]


class Schedule:
    """All stages of one model. Made anew for each pass: what learns may change in between, and it is cheap."""

    def __init__(self, model: T5) -> None:
        embeds = model.embedding.requires_grad
        self.encoder = StackSchedule(model, False, embeds, False)
        self.decoder = StackSchedule(model, True, embeds, bool(self.encoder.learning))
        self.num_blocks = len(model.encoder.blocks) + len(model.decoder.blocks)
        self.bias_tables = [stack.bias.table for stack in (model.encoder, model.decoder) if stack.bias is not None]
        self.shared = [*self.bias_tables, model.embedding, *([] if model.head is None else [model.head])]

    def forward(self) -> list[list[nn.Parameter]]:
        """The weights of each stage in the order of forward."""
        return [stage.weights for stage in (*self.encoder.stages, *self.decoder.stages)]

    def backward(self) -> list[list[nn.Parameter]]:
        """The groups of weights in the order in which backward completes their gradients: the same on all processes."""
        stages = [stage for stack in (self.decoder, self.encoder) for stage in reversed(stack.learning)]
        return [*(stage.weights for stage in stages), self.shared]
