"""How do micro-batches pass through one stack, forward and back, one block at a time?

Forward leaves, for each stage that learns or lies above one that does, the passes of all micro-batches; backward takes them
from the last stage to the first and frees each as it goes. Below that, and in evaluation, nothing is left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.checkpointing import BlockPass, Checkpointing, backward_from
from engine.finite import OnReady
from engine.micro_batches import MicroBatch
from engine.offload import CheckpointedActivations
from engine.schedule import BlockInputs, BlockStage, StackSchedule
from engine.token_gradients import add_token_gradients
from engine.weights import WeightStore
from model.dropout import Dropout
from model.quantization import embed


@dataclass(frozen=True)
class Policies:
    """How blocks are passed through: what the plan decides, whatever is trained.

    Args:
        checkpointing: which blocks are saved, which recomputed.
        weight_store: where weights rest, and in which dtypes.
        checkpointed: where checkpointed activations wait for backward.
        between_blocks_dtype: of what passes between blocks. Where products are fp32 for lack of fast bf16 ones, bf16 halves
            what these activations take, and rounds as products in bf16 would.
        trim: returns freed memory that the allocator holds; called at the start, after each saved block, before the loss and
            before the way back through the encoder, where the walk holds most.
    """

    checkpointing: Checkpointing
    weight_store: WeightStore
    checkpointed: CheckpointedActivations
    between_blocks_dtype: torch.dtype
    trim: Callable[[], object]


@dataclass(frozen=True)
class _Trace:
    """What forward leaves of a stage for backward: one pass a micro-batch, in order."""

    stage: BlockStage
    passes: deque[BlockPass]


class Passage:
    """All micro-batches on their way through one stack.

    Args:
        schedule: the stages of the stack. policies: how they are passed through. micro_batches: in their order.
        dropouts: (hidden, adapters) rates. num_blocks: of both stacks. goes_back: whether backward follows.
    """

    def __init__(
        self,
        schedule: StackSchedule,
        policies: Policies,
        micro_batches: Sequence[MicroBatch],
        dropouts: tuple[float, float],
        num_blocks: int,
        goes_back: bool,
    ) -> None:
        self.schedule, self.policies, self._num_blocks = schedule, policies, num_blocks
        self._ids, self._rows = [schedule.ids(mb) for mb in micro_batches], [schedule.rows(mb) for mb in micro_batches]
        learns = goes_back and schedule.entry.weights[0].requires_grad
        # made before anything runs: the host has time while the device computes
        self._token_sums = schedule.token_sums(micro_batches) if learns else None
        rate, adapter_rate = dropouts
        self._drops = [Dropout(rate, rows, adapter_rate=adapter_rate) for rows in self._rows]
        self._bias = self._bias_leaf()
        self._first = schedule.backward_range.first if goes_back else len(schedule.stages)
        self._trace: list[_Trace] = []

    def forward(self, further: Sequence[BlockInputs] | None = None) -> list[Tensor]:
        """The stack's output of each micro-batch.

        Args:
            further: what the blocks are given beside their input, bias, rows and dropout: the encoder's output.
        """
        inputs: list[BlockInputs] = [
            {"bias": self._bias, "rows": rows, "dropout": drop, **more}
            for rows, drop, more in zip(self._rows, self._drops, further or [{}] * len(self._rows), strict=True)
        ]
        policies, weight_store = self.policies, self.policies.weight_store
        xs = self._enter()
        for stage in self.schedule.stages[: self._first]:
            xs = self._only_forward(stage, inputs, xs)
        for stage in self.schedule.stages[self._first :]:
            row = self._passes(stage, inputs, xs)
            with stage.bring(weight_store):
                self._expect(self.schedule.stages[len(self._trace) + self._first + 1 :][:1])
                xs = [block_pass.forward().to(self._dtype_after(stage)) for block_pass in row]
            if policies.checkpointing.saved_blocks and policies.checkpointing.saves(stage.number, self._num_blocks):
                policies.trim()  # else the gaps it has freed between the tensors of its graph add up from block to block
            self._trace.append(_Trace(stage, deque(row)))
            policies.checkpointed.after_forward(row)
        return xs

    def backward(self, grads: deque[Tensor], on_ready: OnReady) -> None:
        """The way back, from the gradients of the outputs; each stage's weights are handed over when it is done.

        Args:
            grads: one a micro-batch; is emptied.
        """
        while self._trace:
            trace = self._trace.pop()
            self.policies.checkpointed.before_backward(trace.passes, self._trace[-1].passes if self._trace else ())
            with trace.stage.bring(self.policies.weight_store):
                self._expect([before.stage for before in self._trace[-1:]])
                _back(trace.passes, grads)
            on_ready(trace.stage.weights)
        self._leave(grads)

    def _expect(self, stages: Sequence[BlockStage]) -> None:
        for stage in stages:
            self.policies.weight_store.expect(stage.weights)

    def finish_bias(self) -> None:
        """Give the shared bias table its gradient; after the walk."""
        module = self.schedule.stack.bias
        if module is not None and self._bias is not None and self._bias.grad is not None:
            with torch.enable_grad():
                again = module(self._bias.shape[1] // 2 + 1)
            backward_from(again, self._bias.grad.to(again.dtype))

    # --- forward ---

    def _enter(self) -> list[Tensor]:
        stack, entry, weight_store = self.schedule.stack, self.schedule.entry, self.policies.weight_store
        (table,), dtype = entry.weights, weight_store.compute_dtype
        with torch.no_grad(), entry.bring(weight_store):
            pairs = zip(self._ids, self._drops, strict=True)
            return [stack.enter(embed(ids, table, dtype), drop).to(self._dtype_between) for ids, drop in pairs]

    @torch.no_grad()
    def _only_forward(self, stage: BlockStage, inputs: Sequence[BlockInputs], xs: list[Tensor]) -> list[Tensor]:
        dtype, left = self.policies.weight_store.compute_dtype, self._dtype_after(stage)
        with stage.bring(self.policies.weight_store):
            return [stage.function(each)(x.to(dtype)).to(left) for each, x in zip(inputs, xs, strict=True)]

    def _passes(self, stage: BlockStage, inputs: Sequence[BlockInputs], xs: Sequence[Tensor]) -> list[BlockPass]:
        is_saved = self.policies.checkpointing.saves(stage.number, self._num_blocks)
        is_lowest = stage is self.schedule.stages[self._first]
        needs_input, dtype = (
            self.schedule.backward_range.entry or not is_lowest,
            self.policies.weight_store.compute_dtype,
        )
        pairs = zip(inputs, xs, strict=True)
        return [BlockPass(stage.function(each), x, is_saved, dtype, needs_input) for each, x in pairs]

    @property
    def _dtype_between(self) -> torch.dtype:
        return self.policies.between_blocks_dtype

    def _dtype_after(self, stage: BlockStage) -> torch.dtype:
        return self.policies.weight_store.compute_dtype if stage.is_last else self._dtype_between

    # --- the shared weights ---

    def _leave(self, grads: deque[Tensor]) -> None:
        """Add the gradient of the embedded tokens into the one embedding buffer, row by row."""
        (weight,), weight_store = self.schedule.entry.weights, self.policies.weight_store
        if not weight.requires_grad:
            return grads.clear()
        buffer = weight_store.open_gradient(weight)
        with torch.no_grad():
            for drop in self._drops:
                grads.append(self.schedule.stack.enter(grads.popleft(), drop))
            add_token_gradients(buffer, self._ids, grads, self._token_sums)
        grads.clear()
        del buffer
        weight_store.close_gradient(weight)

    def _bias_leaf(self) -> Tensor | None:
        """The stack's bias over distances as a leaf that gathers the gradient of all its blocks; one for all micro-batches."""
        module = self.schedule.stack.bias
        if module is None:
            return None
        with torch.no_grad():
            bias: Tensor = module(
                max(rows.longest for rows in self._rows)
            )  # fp32: the gradients of all blocks add up in it
        return bias.requires_grad_(module.table.requires_grad)


def _back(passes: deque[BlockPass], grads: deque[Tensor]) -> None:
    """All micro-batches backward through one stage: each pass and its gradient go, the gradient of its input comes."""
    while passes:
        passed = passes.popleft().backward(grads.popleft())
        if passed is not None:  # else backward ends here, and the gradient of the entry is not wanted
            grads.append(passed)
