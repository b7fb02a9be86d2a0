"""How does one step pass through the model? Forward through the blocks and back, one block at a time.

    forward:   for each block, for each slice: run it, keep its boundary (and, where `keep` says so, its local graph)
    loss:      in chunks, for each slice; the head's gradient goes into one buffer
    backward:  for each block from the last to the first, for each slice: (run again,) backward through this block alone;
               then the block is handed over: reduce between processes -> update -> free its gradients
    shared:    embedding, head and position bias gather their gradients on the way and are handed over at the end

Every mode of the program is a policy of this loop. What a step holds is exactly: the boundaries of all slices, the kept
graphs, one slice's activations of one block, one block's gradients, and those of the shared weights.
Gradients equal those of plain autograd over `T5.forward`, whatever the slices and the policies (tests hold it).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.keep import Keep, Visit
from engine.residency import Residency
from engine.slices import Slice
from model.dropout import Dropout
from model.loss import LossSettings, loss_and_gradients, loss_only
from model.t5 import T5, Stack

OnReady = Callable[[Sequence[nn.Parameter]], None]
BlockFunction = Callable[[Tensor], Tensor]


@dataclass
class _Stage:
    """One stop of the walk: weights, and for each slice the function that uses them."""

    weights: list[nn.Parameter]
    functions: list[BlockFunction]


@dataclass
class _Trace:
    """What forward leaves for backward: stages and, for each, one visit a slice."""

    stages: list[_Stage]
    visits: list[list[Visit]]


class Walk:
    """The walk through one model.

    Args:
        model: its weights may be stored in another dtype than is computed in (see `residency`).
        keep: which blocks keep their graphs.
        residency: how a block's weights are brought and released.
        loss: chunking, label smoothing, z-loss.
        dropout_rate: of training; evaluation never drops.
    """

    def __init__(self, model: T5, keep: Keep, residency: Residency, loss: LossSettings, dropout_rate: float) -> None:
        self.model, self.keep, self.residency, self.loss_settings = model, keep, residency, loss
        self.dropout_rate = dropout_rate
        self.num_blocks = len(model.encoder.blocks) + len(model.decoder.blocks)

    def gradients(self, slices: Sequence[Slice], total_labels: int, on_ready: OnReady) -> Tensor:
        """Form the gradient of sum(loss) / total_labels over all slices, handing over each block's when complete.

        Args:
            slices: the micro-batches that pass through each block together.
            total_labels: labels of the whole effective batch, over all slices and processes.
            on_ready: called with weights whose `.grad` is complete; it must leave `.grad` None or accumulate on purpose.
        Returns:
            the summed loss, a fp32 scalar on the device.
        """
        model = self.model
        encoder_bias, decoder_bias = self._bias_leaf(model.encoder, slices), self._bias_leaf(model.decoder, slices)
        encoder_drop = [Dropout(self.dropout_rate, s.source) for s in slices]
        decoder_drop = [Dropout(self.dropout_rate, s.target) for s in slices]

        stages = self._encoder_stages(slices, encoder_bias, encoder_drop)
        xs = [self._enter(model.encoder, s.input_ids, d) for s, d in zip(slices, encoder_drop, strict=True)]
        memories, encoder_trace = self._forward(stages, xs, 0)
        for memory in memories:
            memory.requires_grad_()
        stages = self._decoder_stages(slices, memories, decoder_bias, decoder_drop)
        ys = [self._enter(model.decoder, s.decoder_ids, d) for s, d in zip(slices, decoder_drop, strict=True)]
        hidden, decoder_trace = self._forward(stages, ys, len(model.encoder.blocks))

        total, grads = self._loss(hidden, slices, total_labels)
        del hidden, ys, xs
        grads = self._backward(decoder_trace, grads, on_ready)
        self._leave(model.decoder, grads, [s.decoder_ids for s in slices], decoder_drop)
        grads = [memory.grad for memory in memories if memory.grad is not None]
        del memories, decoder_trace, stages
        grads = self._backward(encoder_trace, grads, on_ready)
        self._leave(model.encoder, grads, [s.input_ids for s in slices], encoder_drop)
        self._finish_bias(model.encoder, encoder_bias)
        self._finish_bias(model.decoder, decoder_bias)
        on_ready(self._shared_weights())
        return total

    @torch.no_grad()
    def loss(self, slices: Sequence[Slice]) -> Tensor:
        """The summed loss of the slices, without dropout or gradients: evaluation."""
        model, settings = self.model, LossSettings(self.loss_settings.chunk_bytes)
        no_drop = [Dropout(0.0, s.source) for s in slices]
        biases = self._bias_leaf(model.encoder, slices), self._bias_leaf(model.decoder, slices)
        xs = [self._enter(model.encoder, s.input_ids, d) for s, d in zip(slices, no_drop, strict=True)]
        memories = self._run(self._encoder_stages(slices, biases[0], no_drop), xs)
        ys = [self._enter(model.decoder, s.decoder_ids, d) for s, d in zip(slices, no_drop, strict=True)]
        hidden = self._run(self._decoder_stages(slices, memories, biases[1], no_drop), ys)
        with self.residency.visit([model.output_weight]):
            head = model.output_weight
            return torch.stack(
                [loss_only(h, head, s.labels, settings) for h, s in zip(hidden, slices, strict=True)]
            ).sum()

    # --- the stops ---

    def _encoder_stages(self, slices: Sequence[Slice], bias: Tensor | None, drops: Sequence[Dropout]) -> list[_Stage]:
        stack = self.model.encoder
        stages = [
            _Stage(
                list(block.parameters()),
                [partial(block, bias=bias, rows=s.source, dropout=d) for s, d in zip(slices, drops, strict=True)],
            )
            for block in stack.blocks
        ]
        return [*stages, _Stage([stack.final_norm.weight], [partial(stack.leave, dropout=d) for d in drops])]

    def _decoder_stages(
        self, slices: Sequence[Slice], memories: Sequence[Tensor], bias: Tensor | None, drops: Sequence[Dropout]
    ) -> list[_Stage]:
        stack, scale = self.model.decoder, self.model.output_scale
        stages = []
        for block in stack.blocks:
            functions: list[BlockFunction] = [
                partial(block, memory=m, bias=bias, rows=s.target, memory_rows=s.source, dropout=d)
                for s, m, d in zip(slices, memories, drops, strict=True)
            ]
            stages.append(_Stage(list(block.parameters()), functions))

        def last(x: Tensor, dropout: Dropout) -> Tensor:
            return stack.leave(x, dropout) * scale

        return [*stages, _Stage([stack.final_norm.weight], [partial(last, dropout=d) for d in drops])]

    def _shared_weights(self) -> list[nn.Parameter]:
        model = self.model
        biases = [stack.bias.table for stack in (model.encoder, model.decoder) if stack.bias is not None]
        return [*biases, model.embedding, *([] if model.head is None else [model.head])]

    # --- forward and back ---

    def _forward(self, stages: list[_Stage], xs: list[Tensor], first: int) -> tuple[list[Tensor], _Trace]:
        visits = []
        for index, stage in enumerate(stages):
            keep = self.keep.keeps(first + index, self.num_blocks)  # a final norm is as good as a block
            with self.residency.visit(stage.weights):
                row = [Visit(function, x, keep) for function, x in zip(stage.functions, xs, strict=True)]
                xs = [visit.forward() for visit in row]
            visits.append(row)
        return xs, _Trace(stages, visits)

    def _run(self, stages: list[_Stage], xs: list[Tensor]) -> list[Tensor]:
        for stage in stages:
            with self.residency.visit(stage.weights):
                xs = [function(x) for function, x in zip(stage.functions, xs, strict=True)]
        return xs

    def _backward(self, trace: _Trace, grads: list[Tensor], on_ready: OnReady) -> list[Tensor]:
        while trace.stages:
            stage, row = trace.stages.pop(), trace.visits.pop()
            with self.residency.visit(stage.weights):
                for index in range(len(row)):
                    grads[index] = row[index].backward(grads[index])
                    row[index] = None  # type: ignore[call-overload]  # its boundary is not needed any more
            on_ready(stage.weights)
        return grads

    def _loss(self, hidden: list[Tensor], slices: Sequence[Slice], total_labels: int) -> tuple[Tensor, list[Tensor]]:
        weight, total, grads = self.model.output_weight, hidden[0].new_zeros((), dtype=torch.float32), []
        with torch.no_grad(), self.residency.visit([weight]):
            self._open_gradient(weight)
            for index, part in enumerate(slices):
                loss, grad = loss_and_gradients(
                    hidden[index], weight, part.labels, 1 / total_labels, self.loss_settings, weight.grad
                )
                hidden[index] = None  # type: ignore[call-overload]  # freed slice by slice
                total += loss
                grads.append(grad)
        return total, grads

    # --- the shared weights ---

    def _enter(self, stack: Stack, ids: Tensor, dropout: Dropout) -> Tensor:
        with torch.no_grad():
            return stack.enter(F.embedding(ids, self.model.embedding).to(self.residency.compute_dtype), dropout)

    def _leave(self, stack: Stack, grads: list[Tensor], ids: Sequence[Tensor], drops: Sequence[Dropout]) -> None:
        """Add the gradient of the embedded tokens into the one embedding buffer, row by row."""
        weight = self.model.embedding
        if not weight.requires_grad:
            return
        if weight.grad is None:
            with self.residency.visit([weight]):
                self._open_gradient(weight)
        assert weight.grad is not None
        with torch.no_grad():
            for index, (rows, drop) in enumerate(zip(ids, drops, strict=True)):
                weight.grad.index_add_(0, rows, stack.enter(grads[index], drop).to(weight.grad.dtype))
                grads[index] = None  # type: ignore[call-overload]

    @staticmethod
    def _open_gradient(weight: nn.Parameter) -> None:
        """A buffer that gradients are added into; in the dtype that the weight has during its visit."""
        if weight.requires_grad and weight.grad is None:
            weight.grad = torch.zeros_like(weight, memory_format=torch.contiguous_format)

    def _bias_leaf(self, stack: Stack, slices: Sequence[Slice]) -> Tensor | None:
        """The stack's bias over distances as a leaf that gathers the gradient of all its blocks; one for all slices."""
        if stack.bias is None:
            return None
        longest = max((s.source if stack is self.model.encoder else s.target).longest for s in slices)
        with torch.no_grad():
            bias = stack.bias(longest).to(self.residency.compute_dtype)
        return bias.requires_grad_(stack.bias.table.requires_grad)

    def _finish_bias(self, stack: Stack, bias: Tensor | None) -> None:
        if stack.bias is not None and bias is not None and bias.grad is not None:
            with torch.enable_grad():
                again = stack.bias(bias.shape[1] // 2 + 1)
            torch.autograd.backward(again, bias.grad.to(again.dtype))
