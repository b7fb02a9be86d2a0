"""One pass over a model, block by block: the two nested loops of a training step.

    forward:   for each block: for each micro-batch: run it; keep its input (a checkpointed activation) or its graph
    loss:      in chunks of tokens, for each micro-batch; the head's gradient goes into one buffer
    backward:  for each block from the last to the first: for each micro-batch: recompute if needed; backward through this block;
               then the optimizer in backward: all-reduce -> finite check -> update -> free the gradients
    shared:    embedding, heads and position bias gather their gradients on the way and are updated at the end

What a step holds is exactly: the checkpointed activations of all micro-batches, the graphs of saved blocks, one micro-batch's
activations of one block, one block's gradients, and those of the shared weights. Gradients equal those of plain autograd over
`T5.forward`, whatever the micro-batches and the plan (tests hold it).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from devices.base import is_host, placed_together
from devices.malloc import HeapTrimmer
from devices.threads import follow_machine, one_thread
from engine.all_reduce import Weights
from engine.gradient_checkpointing import BlockFunction, CheckpointedBlock, backward_from, is_saved
from engine.loss_scaling import LossScaling
from engine.optimizer_in_backward import OptimizerInBackward
from engine.weights import WeightStore
from model.block_parts import BlockParts, place_dropout_keys, run_block
from model.dropout import Dropout
from model.embedding_gradients import TokenSums, add_token_gradients
from model.layers import residual_dtype
from model.loss import LossSettings, loss_and_gradients, sum_of, token_losses
from model.micro_batch import MicroBatch
from model.quantization import embed, rows_of
from model.t5 import T5, Block, Stack


class Blockwise:
    """Passes over one model, block by block.

    Args:
        model: its weights may be stored in another dtype than they are computed in (see `weight_store`).
        saved_blocks: how many of the last blocks keep their graphs for backward; the others are recomputed.
        weight_store: where weights are stored, and in which dtypes.
        loss: chunking, label smoothing, z-loss.
        dropout_rate: of training; evaluation never drops.
        objective: what is made of the output of the last stack: the decoder, or an encoder that has none.
        scaling: the factor on the loss of which gradients are formed; None: 1.
        between_blocks_dtype: of what passes between blocks; None: that of the residual stream. Where products are fp32 for
            lack of fast bf16 ones, bf16 halves what these activations take, and rounds as products in bf16 would.
        heap: returns freed memory that malloc holds, all of it between stacks, else what is too much; None: it stays.
        parts: compiled functions that blocks are made of (`engine.compiled`); None: blocks run as they are.
    """

    def __init__(
        self,
        model: T5,
        saved_blocks: int,
        weight_store: WeightStore,
        loss: LossSettings,
        dropout_rate: float,
        objective: Objective | None = None,
        scaling: LossScaling | None = None,
        between_blocks_dtype: torch.dtype | None = None,
        heap: HeapTrimmer | None = None,
        parts: BlockParts | None = None,
    ) -> None:
        self.parts = parts
        self.model, self.saved_blocks, self.weight_store, self.loss_settings = model, saved_blocks, weight_store, loss
        self.dropout_rate, self.objective, self.scaling = dropout_rate, objective or Objective(), scaling
        self.heap = heap or HeapTrimmer("small")
        self.between_blocks_dtype = between_blocks_dtype or residual_dtype(weight_store.compute_dtype)

    def gradients(
        self,
        micro_batches: Sequence[MicroBatch],
        total_labels: int,
        update: OptimizerInBackward | None = None,
        is_last: bool = True,
    ) -> Tensor:
        """Form the gradient of sum(loss) / total_labels over all micro-batches, and update each block when its own is complete.

        Args:
            micro_batches: that pass through each block together.
            total_labels: labels (or pairs of answers) of the whole effective batch, over all micro-batches and processes.
            update: applies the gradients; None: they stay.
            is_last: False: the gradients stay, and the next pass adds to them.
        Returns:
            the summed loss, a fp32 scalar on the device.
        """
        self.heap.trim()
        schedule = Schedule(self.model)
        micro_batches = self.objective.complete(micro_batches, self.token_losses)
        upcoming = deque([*schedule.forward(), *schedule.backward()])
        decoder = None  # of an encoder: the loss is formed of its own output
        with placed_together():
            encoder = StackPass(self, schedule, schedule.encoder, micro_batches, upcoming, with_backward=True)
            if schedule.decoder is not None:
                decoder = StackPass(self, schedule, schedule.decoder, micro_batches, upcoming, with_backward=True)
        encoder_learns, outputs = bool(schedule.encoder.learning), encoder.forward()
        if decoder is None:
            hidden, outputs = deque(outputs), []
        else:
            pairs = zip(micro_batches, outputs, strict=True)
            outputs = [mb.spread(x).requires_grad_(encoder_learns) for mb, x in pairs]
            hidden = deque(decoder.forward(outputs))
        self.heap.trim_excess()

        total, grads = self._loss(hidden, micro_batches, total_labels)
        apply = update.apply if update is not None and is_last else None
        if decoder is not None:
            decoder.backward(grads, apply)
            pairs = zip(micro_batches, outputs, strict=True)
            grads = deque([mb.gather(output.grad) for mb, output in pairs if output.grad is not None])
            del outputs, pairs
            self.heap.trim()
        encoder.backward(grads, apply)
        encoder.finish_bias()
        if decoder is not None:
            decoder.finish_bias()
        if apply is not None:
            apply(schedule.shared)
        return total

    def _loss(
        self, hidden: deque[Tensor], micro_batches: Sequence[MicroBatch], total_labels: int
    ) -> tuple[Tensor, deque[Tensor]]:
        """The summed loss, and the gradients of the hidden states, which go micro-batch by micro-batch."""
        head, total = self.model.output_weight, hidden[0].new_zeros((), dtype=torch.float32)
        # of rows with masked labels a whole batch may have none
        scale = (1.0 if self.scaling is None else self.scaling.scale) / max(1, total_labels)
        grads = deque[Tensor]()
        tables = [head] if self.model.config.is_text else []
        with torch.no_grad(), self.weight_store.for_products(tables):
            for table in tables:
                if table.requires_grad:
                    self.weight_store.open_gradient(table)
                if (rows := rows_of(table)) is not None and rows[1].requires_grad:
                    self.weight_store.open_gradient(rows[1])
            for micro_batch in micro_batches:
                judged = micro_batch.judged(hidden.popleft())
                loss, grad = self.objective.loss_and_gradients(judged, head, micro_batch, scale, self.loss_settings)
                total += loss
                grads.append(micro_batch.unjudged(grad))
        return total, grads

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
        settings, head = LossSettings(self.loss_settings.chunk_bytes), self.model.output_weight
        hidden = self._forward(micro_batches)
        with self.weight_store.for_products([head] if self.model.config.is_text else []):
            pairs = zip(hidden, micro_batches, strict=True)
            return [self.objective.token_losses(mb.judged(x), head, mb, settings) for x, mb in pairs]

    @torch.no_grad()
    def predict(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """What the head over labels makes of each micro-batch, without dropout, as of `model.label_head.LabelHead`."""
        label_head = self.model.label_head
        assert label_head is not None, "the model has no head over labels"
        pairs = zip(self._forward(micro_batches), micro_batches, strict=True)
        with one_thread():
            return [label_head(mb.judged(x), mb.label_rows) for x, mb in pairs]

    @torch.no_grad()
    def encode(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """The encoder's output of each micro-batch, row after row without padding (N, D), and without dropout."""
        outputs = self._forward(micro_batches, is_encoder_only=True)
        return [mb.source.tokens(x) for x, mb in zip(outputs, micro_batches, strict=True)]

    def _forward(self, micro_batches: Sequence[MicroBatch], is_encoder_only: bool = False) -> list[Tensor]:
        """The output of the last stack (N', D) of each micro-batch, without dropout."""
        follow_machine()
        schedule = Schedule(self.model)
        stacks = schedule.stacks[:1] if is_encoder_only else schedule.stacks
        upcoming = deque(stage.weights for stack in stacks for stage in stack.stages)
        with placed_together():
            encoder, *decoders = (
                StackPass(self, schedule, stack, micro_batches, upcoming, with_backward=False) for stack in stacks
            )
        outputs = encoder.forward()
        for decoder in decoders:
            outputs = [mb.spread(output) for mb, output in zip(micro_batches, outputs, strict=True)]
            outputs = decoder.forward(outputs)
        self.heap.trim()
        return outputs

    def zero_gradients(self, weights: Weights) -> None:
        """Give weights the gradients of their shapes and dtypes that `gradients` would hand over, all zero."""
        schedule = Schedule(self.model)
        stored = {id(weight) for weight in (*schedule.bias_tables, *schedule.label_head)}  # used in the storage dtype
        with self.weight_store.in_compute_dtype([weight for weight in weights if id(weight) not in stored]):
            for weight in weights:
                weight.grad = torch.zeros_like(weight) if weight.requires_grad else None


class StackPass:
    """All micro-batches on their way through one stack, forward and back.

    Args:
        blockwise: the model and how it is passed. schedule: of the model. stack: the stages of this stack.
        micro_batches: in their order. upcoming: the weights of all stages to come, in both stacks; each is taken off when used.
        with_backward: whether backward follows.
    """

    def __init__(
        self,
        blockwise: Blockwise,
        schedule: Schedule,
        stack: StackSchedule,
        micro_batches: Sequence[MicroBatch],
        upcoming: deque[list[nn.Parameter]],
        with_backward: bool,
    ) -> None:
        self.blockwise, self.schedule, self.stack, self.upcoming = blockwise, schedule, stack, upcoming
        self.embedding, self.compute_dtype = blockwise.model.embedding, blockwise.weight_store.compute_dtype
        self.residual_dtype = residual_dtype(self.compute_dtype)  # inside of a block
        self.first_learning = stack.first_learning if with_backward else len(stack.stages)
        # of each micro-batch
        self.micro_batches, is_decoder = micro_batches, stack.is_decoder
        self.ids = [mb.decoder_ids if is_decoder else mb.input_ids for mb in micro_batches]
        self.rows = [mb.target if is_decoder else mb.source for mb in micro_batches]
        rate, adapter_rate = (blockwise.dropout_rate, blockwise.model.adapter_dropout) if with_backward else (0.0, 0.0)
        self.dropouts = [Dropout(rate, rows, adapter_rate=adapter_rate) for rows in self.rows]
        self.dropout_keys: list[Tensor | None] = [None for _ in self.rows]
        if blockwise.parts is not None and rate:
            self.dropout_keys = [place_dropout_keys(rows, stack.blocks, self.embedding.device) for rows in self.rows]
        # of all together
        self.longest = max((rows.longest for rows in self.rows), default=0)
        self.bias: Tensor | None = None
        self.token_sums: TokenSums | None = None
        host_ids = [mb.host_ids[is_decoder] for mb in micro_batches if mb.host_ids]
        if with_backward and self.embedding.requires_grad and len(host_ids) == len(micro_batches):
            # made before anything runs: the host has time while the device computes
            self.token_sums = TokenSums.of(host_ids, self.embedding.device)
        if not is_host(self.embedding) and stack.stack.bias is not None and self.rows:
            stack.stack.bias.place_buckets(self.longest)
        # of each stage that learns, what backward needs: its block on each micro-batch
        self.checkpoints: list[tuple[Stage, deque[CheckpointedBlock]]] = []

    def forward(self, encoder_outputs: Sequence[Tensor] = ()) -> list[Tensor]:
        """The stack's output (N, D) of each micro-batch; for the decoder, given that of the encoder."""
        blockwise, weight_store = self.blockwise, self.blockwise.weight_store
        self.bias = self._bias_leaf()
        stages, hidden, inputs = self.stack.stages, self._embedded(), self._inputs(encoder_outputs)
        for index, stage in enumerate(stages):
            learns = index >= self.first_learning
            keeps_graph = learns and is_saved(stage.number, self.schedule.num_blocks, blockwise.saved_blocks)
            needs_input = self.stack.entry_learns or index > self.first_learning
            dtype = self.compute_dtype if stage.is_norm else blockwise.between_blocks_dtype
            with weight_store.in_compute_dtype(stage.weights):
                self._expect_next(is_last=index == len(stages) - 1)
                blocks = [
                    CheckpointedBlock(
                        stage.function(each, blockwise.parts),
                        x,
                        keeps_graph,
                        self.residual_dtype,
                        needs_input,
                        blockwise.heap,
                    )
                    for each, x in zip(inputs, hidden, strict=True)
                ]
                hidden = [block.forward().to(dtype) for block in blocks]
            if learns:
                self.checkpoints.append((stage, deque(blocks)))
        return hidden

    def backward(self, grads: deque[Tensor], apply: Callable[[Weights], object] | None) -> None:
        """From the gradients of the outputs to those of all weights of the stack.

        Args:
            grads: one a micro-batch; is emptied. apply: called with each stage's weights when their gradients are complete.
        """
        blockwise = self.blockwise
        while self.checkpoints:
            stage, blocks = self.checkpoints.pop()
            with blockwise.weight_store.in_compute_dtype(stage.weights):
                self._expect_next(is_last=not self.checkpoints)
                while blocks:
                    grad = blocks.popleft().backward(grads.popleft())
                    if grad is not None:  # else backward ends here, and the gradient of the input is not wanted
                        grads.append(grad)
            if apply is not None:
                apply(stage.weights)
        self._embedding_backward(grads)

    def finish_bias(self) -> None:
        """Take the gradient that the blocks have gathered in the bias back to its table."""
        module = self.stack.stack.bias
        if module is not None and self.bias is not None and self.bias.grad is not None:
            with torch.enable_grad():
                bias = module(self.longest)  # with its graph, which `_bias_leaf` has left out
            backward_from(bias, self.bias.grad.to(bias.dtype))

    def _expect_next(self, is_last: bool) -> None:
        self.upcoming.popleft()
        self.blockwise.weight_store.expect(() if is_last else self.upcoming[0], self.upcoming)

    def _inputs(self, encoder_outputs: Sequence[Tensor]) -> list[dict[str, Any]]:
        """What the blocks take for each micro-batch, beside their input."""
        inputs: list[dict[str, Any]] = [{"bias": self.bias, "dropout": dropout} for dropout in self.dropouts]
        for each, keys in zip(inputs, self.dropout_keys, strict=True):
            if self.blockwise.parts is None:
                each["dtype"] = self.compute_dtype
            else:
                each["keys"] = keys
        if self.stack.is_decoder:
            for each, mb, output in zip(inputs, self.micro_batches, encoder_outputs, strict=True):
                each.update(encoder_output=output, encoder_rows=mb.encoder_output_rows)
        return inputs

    def _embedded(self) -> list[Tensor]:
        dtype = self.blockwise.between_blocks_dtype
        with torch.no_grad():
            return [
                self._entered(embed(ids, self.embedding, self.residual_dtype), dropout).to(dtype)
                for ids, dropout in zip(self.ids, self.dropouts, strict=True)
            ]

    def _entered(self, x: Tensor, dropout: Dropout) -> Tensor:
        """Dropout of the embedded tokens, or with the same mask of their gradient."""
        dropout.at(self.stack.stack.site).begin(x.device)
        return self.stack.stack.enter(x, dropout)

    def _embedding_backward(self, grads: deque[Tensor]) -> None:
        """Add the gradient of the embedded tokens into the one embedding buffer, row by row."""
        if not self.stack.entry_learns:
            return grads.clear()
        store, rows = self.blockwise.weight_store, rows_of(self.embedding)
        with torch.no_grad():
            for dropout in self.dropouts:
                grads.append(self._entered(grads.popleft(), dropout))
            if self.embedding.requires_grad:
                add_token_gradients(store.open_gradient(self.embedding), self.ids, grads, self.token_sums)
            if rows is not None and rows[1].requires_grad:
                places = [ids - rows[0] for ids in self.ids]
                inside = [(part >= 0) & (part < len(rows[1])) for part in places]
                of_rows = [part[kept] for part, kept in zip(places, inside, strict=True)]
                buffer = store.open_gradient(rows[1])  # also without such tokens: other processes may have some
                if any(map(len, of_rows)):
                    kept_grads = [grad[kept] for grad, kept in zip(grads, inside, strict=True)]
                    add_token_gradients(buffer, of_rows, kept_grads)
        grads.clear()

    def _bias_leaf(self) -> Tensor | None:
        """The stack's bias as a leaf that gathers the gradient of all its blocks; one for all micro-batches."""
        module = self.stack.stack.bias
        if module is None or not self.rows:
            return None
        with torch.no_grad():
            # fp32: the gradients of all blocks add up in it
            bias: Tensor = module(self.longest)
        return bias.requires_grad_(module.table.requires_grad)


# --- the order of stages


class Stage:
    """A block, or the norm after the last one, which is as good as a block.

    Args:
        number: of the block, counted over both stacks. index: in its own stack.
    """

    def __init__(self, stack: Stack, module: nn.Module, number: int, index: int) -> None:
        self.stack, self.module, self.number = stack, module, number
        self.index = index
        self.weights = list(module.parameters())
        self.is_norm = module is stack.final_norm

    def function(self, inputs: Mapping[str, Any], parts: BlockParts | None) -> BlockFunction:
        """The block with everything but its input given; each time that it runs it drops the same.

        Args:
            inputs: what it takes beside its input; with `parts` the keys of dropout are those of all blocks of the stack.
        """
        if self.is_norm:
            block = partial(self.stack.leave, dropout=inputs["dropout"])
        elif parts is None:
            block = partial(self.module, **inputs)
        else:
            keys = inputs["keys"]
            of_block = None if keys is None else keys[self.index].detach()
            assert isinstance(self.module, Block)
            block = partial(run_block, parts, self.module, **{**inputs, "keys": of_block})
        dropout = inputs["dropout"].at(self.stack.site + 1 if self.is_norm else self.module.site)

        def run(x: Tensor, *, graph_only: bool = False) -> Tensor:
            dropout.begin(x.device)
            return block(x, graph_only=graph_only)

        return run


class StackSchedule:
    """The stages of one stack.

    Args:
        model: whose stack it is. entry_learns: whether the gradient of the stack's input is wanted.
        all_learn: whether something besides the input needs the gradients of all blocks.
    """

    def __init__(self, model: T5, is_decoder: bool, entry_learns: bool, all_learn: bool) -> None:
        self.is_decoder, self.entry_learns = is_decoder, entry_learns
        self.stack = stack = model.decoder if is_decoder else model.encoder
        self.blocks = [block for block in stack.blocks if isinstance(block, Block)]
        first = len(model.encoder.blocks) if is_decoder else 0
        modules = [*stack.blocks, stack.final_norm]
        self.stages = [Stage(stack, module, first + index, index) for index, module in enumerate(modules)]
        bias_learns = stack.bias is not None and stack.bias.table.requires_grad
        learning = [i for i, stage in enumerate(self.stages) if any(w.requires_grad for w in stage.weights)]
        # the lowest stage that backward runs; the number of stages: none
        self.first_learning = 0 if entry_learns or all_learn or bias_learns else min(learning, default=len(self.stages))

    @property
    def learning(self) -> list[Stage]:
        """The stages that backward runs, in forward order."""
        return self.stages[self.first_learning :]


class Schedule:
    """The order in which a pass needs the weights of a model. Made anew for each pass: what learns may change in between.

    Backward ends at the lowest stage of a stack below which nothing learns: what lies further down runs forward only, has no
    checkpointed activations and runs once. The embedding lies below the first block of both stacks, a shared position bias is
    used in every block of its own, and the encoder lies below every block of the decoder, by way of its cross-attention.
    """

    def __init__(self, model: T5) -> None:
        rows = [] if model.token_rows is None else list(model.token_rows.parameters())
        embeds = model.embedding.requires_grad or any(weight.requires_grad for weight in rows[:1])
        self.encoder = StackSchedule(model, False, embeds, False)
        self.decoder = None
        if model.config.num_decoder_layers:
            self.decoder = StackSchedule(model, True, embeds, bool(self.encoder.learning))
        self.num_blocks = sum(len(stack.blocks) for stack in model.stacks.values())
        self.bias_tables = [stack.bias.table for stack in model.stacks.values() if stack.bias is not None]
        self.label_head = [] if model.label_head is None else list(model.label_head.parameters())
        heads = [*([] if model.head is None else [model.head]), *self.label_head]
        self.shared = [*self.bias_tables, model.embedding, *heads, *rows]

    def forward(self) -> list[list[nn.Parameter]]:
        """The weights of each stage in the order of forward."""
        return [stage.weights for stack in self.stacks for stage in stack.stages]

    def backward(self) -> list[list[nn.Parameter]]:
        """The groups of weights in the order in which backward completes their gradients: the same on all processes."""
        stages = [stage for stack in reversed(self.stacks) for stage in reversed(stack.learning)]
        return [*(stage.weights for stage in stages), self.shared]

    @property
    def stacks(self) -> list[StackSchedule]:
        """Encoder, and decoder unless there is none."""
        return [self.encoder, *([] if self.decoder is None else [self.decoder])]


# --- what is minimised

# a forward without gradients or dropout: the loss of each token (N',), fp32, of each micro-batch
TokenLosses = Callable[[Sequence[MicroBatch]], Sequence[Tensor]]


class Objective:
    """The cross-entropy of each label token: pretraining and finetuning. Others override what differs.

    Hidden states are those of `MicroBatch.label_rows`.
    """

    def complete(self, micro_batches: Sequence[MicroBatch], token_losses: TokenLosses) -> Sequence[MicroBatch]:
        """Give the micro-batches with all that the loss needs; called before the pass holds anything."""
        return micro_batches

    def loss_and_gradients(
        self, hidden: Tensor, head: Tensor, micro_batch: MicroBatch, scale: float, settings: LossSettings
    ) -> tuple[Tensor, Tensor]:
        """The summed loss of a micro-batch, and the gradient of its hidden states times `scale`.

        Args and returns as of `model.loss.loss_and_gradients`; the head's gradient is added to the one that it has, if any.
        """
        return loss_and_gradients(hidden, head, micro_batch.labels, scale, settings, head.grad)

    def token_losses(self, hidden: Tensor, head: Tensor, micro_batch: MicroBatch, settings: LossSettings) -> Tensor:
        """The loss of each token (N',) of a micro-batch, fp32, without gradients; arguments as of `loss_and_gradients`."""
        return token_losses(hidden, head, micro_batch.labels, settings)

    def loss(self, losses: Tensor, micro_batch: MicroBatch) -> Tensor:
        """The summed loss of a micro-batch from its token losses (N',): evaluation."""
        return sum_of(losses)

    def clear(self) -> None:
        """Begin to count metrics anew."""

    @property
    def metrics(self) -> dict[str, float]:
        """Further figures since `clear`, each a sum over what the loss is averaged over; the same names on all ranks."""
        return {}
