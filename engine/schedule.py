"""In which order does a step need which weights? The one order of stages, for whoever goes through the model.

    forward:   embedding -> the encoder's blocks -> its norm -> embedding -> the decoder's blocks -> its norm -> head
    backward:  the decoder's stages from its norm down to where nothing below learns, the encoder's likewise; last the
               shared weights, whose gradients gather on the way

Gradients and evaluation go forward through the same stages; a process that has no rows of its own brings the same weights
in the same order; one that has failed knows from here what the others hand over next.

Backward ends at the lowest stage of a stack below which nothing learns: what lies further down runs forward only, has no
checkpointed activations and runs once. The embedding lies below the first block of both stacks, a shared position bias is
used in every block of its own, and the encoder lies below every block of the decoder, by way of its cross-attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from engine.checkpointing import BlockFunction
from engine.micro_batches import MicroBatch
from engine.token_gradients import TokenSums
from engine.weights import WeightStore
from model.dropout import Dropout
from model.rows import Rows
from model.t5 import T5, Stack

# what the blocks of a stack are given for one micro-batch, beside their input
BlockInputs = Mapping[str, Any]


class Stage:
    """One stop: weights that are needed together.

    Args:
        weights: all of them.
    """

    def __init__(self, weights: list[nn.Parameter]) -> None:
        self.weights = weights

    def bring(self, weight_store: WeightStore) -> AbstractContextManager[None]:
        """The weights as this stage needs them, until the context ends."""
        return weight_store.in_compute_dtype(self.weights)


class TableStage(Stage):
    """The embedding, from which rows are looked up."""

    def bring(self, weight_store: WeightStore) -> AbstractContextManager[None]:
        return weight_store.in_rest_dtype(self.weights)


class HeadStage(Stage):
    """The table that the loss multiplies with."""

    def bring(self, weight_store: WeightStore) -> AbstractContextManager[None]:
        return weight_store.for_products(self.weights)


class BlockStage(Stage):
    """A block, or the norm after the last one, which is as good as a block.

    Args:
        block: what runs. number: its place among the blocks of both stacks. is_last: whether it is the stack's norm.
    """

    def __init__(self, block: nn.Module, number: int, is_last: bool) -> None:
        super().__init__(list(block.parameters()))
        self.block, self.number, self.is_last = block, number, is_last

    def function(self, inputs: BlockInputs) -> BlockFunction:
        """The block with everything but its input given."""
        return partial(self.block, **inputs)


class NormStage(BlockStage):
    """The norm after a stack's last block; the decoder's output is scaled after it."""

    def __init__(self, stack: Stack, number: int, scale: float | None) -> None:
        super().__init__(stack.final_norm, number, True)
        self.stack, self.scale = stack, scale

    def function(self, inputs: BlockInputs) -> BlockFunction:
        return partial(self._leave, dropout=inputs["dropout"])

    def _leave(self, x: Tensor, dropout: Dropout, *, graph_only: bool = False) -> Tensor:
        left = self.stack.leave(x, dropout, graph_only=graph_only)
        return left if self.scale is None else left * self.scale


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


class StackSchedule:
    """The stages of one stack.

    Args:
        model: whose stack it is. is_decoder: which of the two. backward_range: where its backward ends.
    """

    def __init__(self, model: T5, is_decoder: bool, backward_range: BackwardRange) -> None:
        self.stack = model.decoder if is_decoder else model.encoder
        self.is_decoder, self.backward_range = is_decoder, backward_range
        first = len(model.encoder.blocks) if is_decoder else 0
        self.entry = TableStage([model.embedding])
        norm = NormStage(self.stack, first + len(self.stack.blocks), model.output_scale if is_decoder else None)
        self.stages = [*(BlockStage(block, first + i, False) for i, block in enumerate(self.stack.blocks)), norm]

    def ids(self, micro_batch: MicroBatch) -> Tensor:
        """The tokens that enter the stack."""
        return micro_batch.decoder_ids if self.is_decoder else micro_batch.input_ids

    def token_sums(self, micro_batches: Sequence[MicroBatch]) -> TokenSums | None:
        """How the gradients of the tokens that enter are summed; None where that is found on the way."""
        known = [micro_batch.host_ids[self.is_decoder] for micro_batch in micro_batches if micro_batch.host_ids]
        return TokenSums.of(known, self.ids(micro_batches[0]).device) if len(known) == len(micro_batches) else None

    def rows(self, micro_batch: MicroBatch) -> Rows:
        """Their layout."""
        return micro_batch.target if self.is_decoder else micro_batch.source

    @property
    def learning(self) -> list[BlockStage]:
        return self.stages[self.backward_range.first :]


class Schedule:
    """All stages of one model, in order. Made anew for each walk: what learns may change in between, and it is cheap."""

    def __init__(self, model: T5) -> None:
        encoder, decoder = backward_ranges(model)
        self.encoder, self.decoder = StackSchedule(model, False, encoder), StackSchedule(model, True, decoder)
        self.head = HeadStage([model.output_weight])
        self.num_blocks = len(model.encoder.blocks) + len(model.decoder.blocks)
        self.bias_tables = [stack.bias.table for stack in (model.encoder, model.decoder) if stack.bias is not None]
        self.shared = [*self.bias_tables, model.embedding, *([] if model.head is None else [model.head])]

    def forward(self) -> Iterator[Stage]:
        """Every stop of a forward."""
        for stack in (self.encoder, self.decoder):
            yield stack.entry
            yield from stack.stages
        yield self.head

    def hand_over_order(self) -> list[list[nn.Parameter]]:
        """The groups in which backward hands weights over, in order: the same on all processes."""
        stages = [stage for stack in (self.decoder, self.encoder) for stage in reversed(stack.learning)]
        return [*(stage.weights for stage in stages), self.shared]


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
