"""How does one step pass through the model? Forward through the blocks and back, one block at a time.

    forward:   for each block, for each micro-batch: run it, hold its input (a checkpointed activation; of saved blocks, the local graph)
    loss:      in chunks, for each micro-batch; the head's gradient goes into one buffer
    backward:  for each block from the last to the first, for each micro-batch: (recompute,) backward through this block alone;
               then the block is handed over: reduce between processes -> update -> free its gradients
    shared:    embedding, head and position bias gather their gradients on the way and are handed over at the end

Every mode of the program is a policy of this loop. What a step holds is exactly: the checkpointed activations of all micro-batches,
the graphs of saved blocks, one micro-batch's activations of one block, one block's gradients, and those of the shared weights.
Gradients equal those of plain autograd over `T5.forward`, whatever the micro-batches and the policies (tests hold it).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from engine.backward_range import BackwardRange, backward_ranges
from engine.checkpointing import BlockFunction, BlockPass, Checkpointing, backward_from
from engine.finite import OnReady
from engine.micro_batches import MicroBatch
from engine.objective import Objective
from engine.offload import CheckpointedActivations
from engine.scaling import LossScaling
from engine.token_gradients import add_token_gradients
from engine.weights import WeightStore
from model.dropout import Dropout
from model.loss import LossSettings, token_losses
from model.quantization import embed
from model.rows import Rows
from model.t5 import T5, Stack


def no_trim() -> None:
    """What is free stays with the allocator."""


def no_check(loss: Tensor) -> None:
    """Any loss goes backward."""


@dataclass
class _Stage:
    """One stop of the walk: weights, for each micro-batch the function that uses them, and the dtype of what it passes on."""

    weights: list[nn.Parameter]
    functions: list[BlockFunction]
    dtype: torch.dtype


@dataclass
class _Trace:
    """What forward leaves for backward: stages and, for each, one pass a micro-batch."""

    stages: list[_Stage]
    passes: list[list[BlockPass]]


class Walk:
    """The walk through one model.

    Args:
        model: its weights may rest in another dtype than they are computed in (see `weight_store`).
        checkpointing: which blocks are saved, which recomputed.
        weight_store: where weights rest, and in which dtypes.
        loss: chunking, label smoothing, z-loss.
        dropout_rate: of training; evaluation never drops.
        objective: what is made of the decoder's output.
        scaling: the factor on the loss of which gradients are formed; None: 1. The same object divides it out of the
            update (`engine.update`). checkpointed: where checkpointed activations wait for backward.
        between_blocks_dtype: of what passes between blocks; None: that of the products. Where these are fp32 for lack of fast
            bf16 ones, bf16 halves what these activations take, and rounds as products in bf16 would.
        trim: returns freed memory that the allocator holds; called at the start, after each saved block, before the loss and before the way back through the encoder, where the walk holds most.
    """

    def __init__(
        self,
        model: T5,
        checkpointing: Checkpointing,
        weight_store: WeightStore,
        loss: LossSettings,
        dropout_rate: float,
        objective: Objective | None = None,
        scaling: LossScaling | None = None,
        checkpointed: CheckpointedActivations | None = None,
        between_blocks_dtype: torch.dtype | None = None,
        trim: Callable[[], object] = no_trim,
    ) -> None:
        self.model, self.checkpointing, self.weight_store, self.loss_settings = model, checkpointing, weight_store, loss
        self.dropout_rate, self.objective = dropout_rate, objective or Objective()
        self.scaling, self.checkpointed, self.trim = scaling, checkpointed or CheckpointedActivations(), trim
        self.check_loss: Callable[[Tensor], object] = no_check  # may abort the walk before backward
        self.between_blocks_dtype = between_blocks_dtype or weight_store.compute_dtype
        self.num_blocks = len(model.encoder.blocks) + len(model.decoder.blocks)

    def gradients(self, micro_batches: Sequence[MicroBatch], total_labels: int, on_ready: OnReady) -> Tensor:
        """Form the gradient of sum(loss) / total_labels over all micro-batches, handing over each block's when complete.

        Args:
            micro_batches: the micro-batches that pass through each block together.
            total_labels: labels (or pairs of answers) of the whole effective batch, over all micro-batches and processes.
            on_ready: called with weights whose `.grad` is complete; it must leave `.grad` None or accumulate on purpose.
        Returns:
            the summed loss, a fp32 scalar on the device.
        """
        model = self.model
        self.trim()
        micro_batches = self.objective.complete(micro_batches, self.token_losses)
        encoder_bias, decoder_bias = (
            self._bias_leaf(model.encoder, micro_batches),
            self._bias_leaf(model.decoder, micro_batches),
        )
        encoder_drop = [self._dropout(mb.source) for mb in micro_batches]
        decoder_drop = [self._dropout(mb.target) for mb in micro_batches]
        encoder_range, decoder_range = backward_ranges(model)
        self.checkpointed.begin()

        stages = self._encoder_stages(micro_batches, encoder_bias, encoder_drop)
        ids = [mb.input_ids for mb in micro_batches]
        # the embedded tokens get no name here: it would hold the first block's input
        encoder_outputs, encoder_trace = self._forward(
            stages, self._enter(model.encoder, ids, encoder_drop), 0, encoder_range
        )  # fmt: skip
        needed = encoder_range.is_needed  # set without a loop, whose variable would hold the last one to the end
        encoder_outputs = [
            mb.spread(output).requires_grad_(needed) for mb, output in zip(micro_batches, encoder_outputs, strict=True)
        ]
        stages = self._decoder_stages(micro_batches, encoder_outputs, decoder_bias, decoder_drop)
        ids = [mb.decoder_ids for mb in micro_batches]
        hidden, decoder_trace = self._forward(
            stages, self._enter(model.decoder, ids, decoder_drop), len(model.encoder.blocks), decoder_range
        )

        self.trim()
        total, grads = self._loss(hidden, micro_batches, total_labels)
        self.check_loss(total)
        del hidden
        grads = self._backward(decoder_trace, grads, on_ready)
        self._leave(model.decoder, grads, [mb.decoder_ids for mb in micro_batches], decoder_drop)
        grads = [
            mb.gather(output.grad)
            for mb, output in zip(micro_batches, encoder_outputs, strict=True)
            if output.grad is not None
        ]
        del encoder_outputs, decoder_trace, stages
        self.trim()
        grads = self._backward(encoder_trace, grads, on_ready)
        self._leave(model.encoder, grads, [mb.input_ids for mb in micro_batches], encoder_drop)
        self._finish_bias(model.encoder, encoder_bias)
        self._finish_bias(model.decoder, decoder_bias)
        on_ready(self._shared_weights())
        return total

    @torch.no_grad()
    def loss(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """The summed loss of the micro-batches, without dropout or gradients: evaluation."""
        micro_batches = self.objective.complete(micro_batches, self.token_losses)
        losses = self.token_losses(micro_batches)
        return torch.stack(
            [self.objective.loss(each, mb) for each, mb in zip(losses, micro_batches, strict=True)]
        ).sum()

    @torch.no_grad()
    def token_losses(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """The cross-entropy of each token (N',) of each micro-batch, fp32, without dropout."""
        model, settings = self.model, LossSettings(self.loss_settings.chunk_bytes)
        no_drop = [Dropout(0.0, mb.source) for mb in micro_batches]
        biases = self._bias_leaf(model.encoder, micro_batches), self._bias_leaf(model.decoder, micro_batches)
        xs = self._enter(model.encoder, [mb.input_ids for mb in micro_batches], no_drop)
        encoder_outputs = self._run(self._encoder_stages(micro_batches, biases[0], no_drop), xs)
        encoder_outputs = [mb.spread(output) for mb, output in zip(micro_batches, encoder_outputs, strict=True)]
        ys = self._enter(model.decoder, [mb.decoder_ids for mb in micro_batches], no_drop)
        hidden = self._run(self._decoder_stages(micro_batches, encoder_outputs, biases[1], no_drop), ys)
        head = model.output_weight
        self.trim()
        with self.weight_store.for_products([head]):
            return [token_losses(h, head, mb.labels, settings) for h, mb in zip(hidden, micro_batches, strict=True)]

    def accompany(self) -> None:
        """Take part in gathering the weights for one `loss` of another process, where all processes gather together."""
        model, weight_store = self.model, self.weight_store
        for stack in (model.encoder, model.decoder):
            with weight_store.in_rest_dtype([model.embedding]):
                pass
            for weights in (*(list(block.parameters()) for block in stack.blocks), [stack.final_norm.weight]):
                with weight_store.in_compute_dtype(weights):
                    pass
        with weight_store.for_products([model.output_weight]):
            pass

    # --- the stops ---

    def _encoder_stages(
        self, micro_batches: Sequence[MicroBatch], bias: Tensor | None, drops: Sequence[Dropout]
    ) -> list[_Stage]:
        stack = self.model.encoder
        stages = [
            _Stage(
                list(block.parameters()),
                [
                    partial(block, bias=bias, rows=mb.source, dropout=d)
                    for mb, d in zip(micro_batches, drops, strict=True)
                ],
                self.between_blocks_dtype,
            )
            for block in stack.blocks
        ]
        return [*stages, self._norm_stage(stack, [partial(stack.leave, dropout=d) for d in drops])]

    def _decoder_stages(
        self,
        micro_batches: Sequence[MicroBatch],
        encoder_outputs: Sequence[Tensor],
        bias: Tensor | None,
        drops: Sequence[Dropout],
    ) -> list[_Stage]:
        stack, scale = self.model.decoder, self.model.output_scale
        stages = []
        for block in stack.blocks:
            functions: list[BlockFunction] = [
                partial(
                    block,
                    encoder_output=output,
                    bias=bias,
                    rows=mb.target,
                    encoder_rows=mb.encoder_output_rows,
                    dropout=drop,
                )
                for mb, output, drop in zip(micro_batches, encoder_outputs, drops, strict=True)
            ]
            stages.append(_Stage(list(block.parameters()), functions, self.between_blocks_dtype))

        def last(x: Tensor, dropout: Dropout, *, graph_only: bool = False) -> Tensor:
            return stack.leave(x, dropout, graph_only=graph_only) * scale

        return [*stages, self._norm_stage(stack, [partial(last, dropout=d) for d in drops])]

    def _norm_stage(self, stack: Stack, functions: list[BlockFunction]) -> _Stage:
        return _Stage([stack.final_norm.weight], functions, self.weight_store.compute_dtype)

    def hand_over_order(self) -> list[list[nn.Parameter]]:
        """The groups in which `gradients` hands weights over, in order: the same on all processes."""
        groups = []
        for stack, backward_range in zip(
            (self.model.decoder, self.model.encoder), reversed(backward_ranges(self.model)), strict=True
        ):
            stages = [*stack.blocks, stack.final_norm][backward_range.first :]
            groups += [list(stage.parameters()) for stage in reversed(stages)]
        return [*groups, self._shared_weights()]

    def zero_gradients(self, weights: Sequence[nn.Parameter]) -> None:
        """Give weights the gradients of their shapes and dtypes that `gradients` would hand over, all zero."""
        biases = [stack.bias.table for stack in (self.model.encoder, self.model.decoder) if stack.bias is not None]
        shared = {id(table) for table in biases}  # used outside of blocks, in the rest dtype
        with self.weight_store.in_compute_dtype([weight for weight in weights if id(weight) not in shared]):
            for weight in weights:
                weight.grad = torch.zeros_like(weight) if weight.requires_grad else None

    def _shared_weights(self) -> list[nn.Parameter]:
        model = self.model
        biases = [stack.bias.table for stack in (model.encoder, model.decoder) if stack.bias is not None]
        return [*biases, model.embedding, *([] if model.head is None else [model.head])]

    # --- forward and back ---

    def _forward(
        self, stages: list[_Stage], xs: list[Tensor], first: int, backward_range: BackwardRange
    ) -> tuple[list[Tensor], _Trace]:
        with torch.no_grad():
            xs, passes = self._run(stages[: backward_range.first], xs), []
        dtype = self.weight_store.compute_dtype
        for index, stage in enumerate(stages[backward_range.first :], backward_range.first):
            needs_input = index > backward_range.first or backward_range.entry
            is_saved = self.checkpointing.saves(first + index, self.num_blocks)  # a final norm is as good as a block
            with self.weight_store.in_compute_dtype(stage.weights):
                row = [BlockPass(f, x, is_saved, dtype, needs_input) for f, x in zip(stage.functions, xs, strict=True)]
                xs = [block_pass.forward().to(stage.dtype) for block_pass in row]
            if is_saved and self.checkpointing.saved_blocks:
                self.trim()  # else the gaps it has freed between the tensors of its graph add up from block to block
            passes.append(row)
            self.checkpointed.after_forward(row)
        return xs, _Trace(stages[backward_range.first :], passes)

    def _run(self, stages: list[_Stage], xs: list[Tensor]) -> list[Tensor]:
        dtype = self.weight_store.compute_dtype
        for stage in stages:
            with self.weight_store.in_compute_dtype(stage.weights):
                xs = [function(x.to(dtype)).to(stage.dtype) for function, x in zip(stage.functions, xs, strict=True)]
        return xs

    def _backward(self, trace: _Trace, grads: list[Tensor], on_ready: OnReady) -> list[Tensor]:
        while trace.stages:
            stage, row = trace.stages.pop(), trace.passes.pop()
            self.checkpointed.before_backward(row, trace.passes[-1] if trace.passes else ())
            with self.weight_store.in_compute_dtype(stage.weights):
                for index in range(len(row)):
                    # None where backward ends and the gradient of the entry is not wanted
                    grads[index] = row[index].backward(grads[index])  # type: ignore[assignment]
                    row[index] = None  # type: ignore[call-overload]  # its input is not needed any more
            on_ready(stage.weights)
        return grads

    def _loss(
        self, hidden: list[Tensor], micro_batches: Sequence[MicroBatch], total_labels: int
    ) -> tuple[Tensor, list[Tensor]]:
        weight, total, grads = self.model.output_weight, hidden[0].new_zeros((), dtype=torch.float32), []
        scale = (1.0 if self.scaling is None else self.scaling.scale) / total_labels
        with torch.no_grad(), self.weight_store.for_products([weight]):
            if weight.requires_grad:
                self.weight_store.open_gradient(weight)
            for index, micro_batch in enumerate(micro_batches):
                loss, grad = self.objective.loss_and_gradients(
                    hidden[index], weight, micro_batch, scale, self.loss_settings, weight.grad
                )
                hidden[index] = None  # type: ignore[call-overload]  # freed micro-batch by micro-batch
                total += loss
                grads.append(grad)
        self.weight_store.close_gradient(weight)
        return total, grads

    # --- the shared weights ---

    def _dropout(self, rows: Rows) -> Dropout:
        return Dropout(self.dropout_rate, rows, adapter_rate=self.model.adapter_dropout)

    def _enter(self, stack: Stack, ids: Sequence[Tensor], drops: Sequence[Dropout]) -> list[Tensor]:
        weight, dtype = self.model.embedding, self.weight_store.compute_dtype
        with torch.no_grad(), self.weight_store.in_rest_dtype([weight]):
            pairs = zip(ids, drops, strict=True)
            return [stack.enter(embed(rows, weight, dtype), drop).to(self.between_blocks_dtype) for rows, drop in pairs]

    def _leave(self, stack: Stack, grads: list[Tensor], ids: Sequence[Tensor], drops: Sequence[Dropout]) -> None:
        """Add the gradient of the embedded tokens into the one embedding buffer, row by row."""
        weight = self.model.embedding
        if not weight.requires_grad:
            return
        buffer = self.weight_store.open_gradient(weight)
        with torch.no_grad():
            for index, drop in enumerate(drops):
                grads[index] = stack.enter(grads[index], drop)
            add_token_gradients(buffer, ids, grads)
        grads.clear()
        del buffer
        self.weight_store.close_gradient(weight)

    def _bias_leaf(self, stack: Stack, micro_batches: Sequence[MicroBatch]) -> Tensor | None:
        """The stack's bias over distances as a leaf that gathers the gradient of all its blocks; one for all micro-batches."""
        if stack.bias is None:
            return None
        longest = max((mb.source if stack is self.model.encoder else mb.target).longest for mb in micro_batches)
        with torch.no_grad():
            bias = stack.bias(longest)  # fp32, so that the gradients of all blocks add up in it
        return bias.requires_grad_(stack.bias.table.requires_grad)

    def _finish_bias(self, stack: Stack, bias: Tensor | None) -> None:
        if stack.bias is not None and bias is not None and bias.grad is not None:
            with torch.enable_grad():
                again = stack.bias(bias.shape[1] // 2 + 1)
            backward_from(again, bias.grad.to(again.dtype))
