"""One pass over a model, block by block: the two nested loops of a training step.

    forward:   for each block: for each micro-batch: run it; keep its input (a checkpointed activation) or its graph
    loss:      in chunks of tokens, for each micro-batch; the head's gradient goes into one buffer
    backward:  for each block from the last to the first: for each micro-batch: recompute if needed; backward through
        this block;
               then the optimizer in backward: all-reduce -> finite check -> update -> free the gradients
    shared:    embedding, heads and position bias accumulate gradients during backward and are updated at the end

What a step holds is exactly: the checkpointed activations of all micro-batches, the graphs of saved blocks, one
micro-batch's activations of one block, one block's gradients, and those of the shared weights. Gradients equal those of
plain autograd over `T5.forward`, whatever the micro-batches and the plan (tests hold it).

Gradient checkpointing: the last blocks of a pass keep their graphs for backward ("saved" blocks), the earlier ones are
recomputed. A saved block holds its activations from forward to backward. A recomputed one holds only its input, the
checkpointed activation, and costs one more forward, without the block's last product, whose result backward does not
need. Both give the same numbers, since dropout masks are a function of row and position, not of a generator's state.
`torch.utils.checkpoint` is not used because its first call imports the compiler front end, 80 MB. Source: Chen et al.
2016 (arXiv 1604.06174).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from devices.base import is_host, placed_together
from devices.malloc import HeapTrimmer
from devices.threads import follow_machine, one_thread
from engine.all_reduce import Weights
from engine.loss_scaling import LossScaling
from engine.optimizer_in_backward import OptimizerInBackward
from engine.weights import WeightStore
from model.block_parts import BlockParts, place_dropout_keys, run_block
from model.dropout import Dropout
from model.embedding_gradients import TokenSums, add_token_gradients
from model.layers import adding_in_place, residual_dtype
from model.loss import LossSettings, loss_and_gradients, sum_of, token_losses
from model.micro_batch import MicroBatch, Side
from model.quantization import embed, parts_of, rows_of
from model.rows import Rows
from model.t5 import T5, Block, Stack

Apply = Callable[[Weights], object]


class Blockwise:
    """Passes over one model, block by block.

    Args:
        model: its weights may be stored in another dtype than they are computed in (see `weight_store`).
        saved_blocks: how many of the last blocks keep their graphs for backward; the others are recomputed.
        weight_store: loads the weights of a block in the compute dtype, and holds gradient buffers.
        loss: chunking, label smoothing, z-loss.
        dropout_rate: of training; evaluation has no dropout.
        objective: computes the loss from the output of the last stack (the decoder, or the encoder if it is alone);
            None: cross-entropy.
        scaling: loss scaling for fp16; None: the loss is not scaled.
        between_blocks_dtype: dtype of the activations between blocks; None: that of the residual stream. On hardware
            without fast bf16 products, bf16 here halves the checkpointed activations, and rounds them as bf16 products
            would.
        heap: returns free memory from malloc to the system: all of it between stacks, and any excess after a block;
            None: malloc keeps it.
        parts: compiled functions that blocks are made of (`engine.compiled`); None: blocks run uncompiled.
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
        self.model = model
        self.saved_blocks = saved_blocks
        self.weight_store = weight_store
        self.loss_settings = loss
        self.dropout_rate = dropout_rate
        self.objective = objective or Objective()
        self.scaling = scaling
        self.residual_dtype = residual_dtype(weight_store.compute_dtype)  # Inside a block.
        self.between_blocks_dtype = between_blocks_dtype or self.residual_dtype
        self.heap = heap or HeapTrimmer("small")
        self.parts = parts

    def gradients(
        self,
        micro_batches: Sequence[MicroBatch],
        total_labels: int,
        update: OptimizerInBackward | None = None,
        is_last: bool = True,
    ) -> Tensor:
        """Compute the gradients of sum(loss) / total_labels over all micro-batches, and update each block as soon as
        its gradients are complete.

        Args:
            micro_batches: those of one accumulation pass; all of them go through a block before the next block runs.
            total_labels: labels (or pairs of answers) of the whole effective batch, over all micro-batches and
                processes.
            update: applies and frees the gradients; None: they are kept in `weight.grad`.
            is_last: whether this is the last accumulation pass of a step; if False, gradients are kept and the next
                pass adds to them.
        Returns:
            the summed loss, a fp32 scalar on the device.
        """
        apply = update.apply if update is not None and is_last else keep_gradients
        self.heap.trim()
        schedule = Schedule(self.model)
        micro_batches = self.objective.complete(micro_batches, self.token_losses)
        passes = self._passes(schedule.stacks, micro_batches, schedule.backward(), self.objective.pool)
        hidden = self._forward(passes)
        self.heap.trim_excess(self.heap.used_bytes())
        total, grads = self._loss(hidden, micro_batches, total_labels)
        for stack_pass in reversed(passes):
            grads = stack_pass.backward(grads, apply)
            self.heap.trim()
        for stack_pass in passes:
            stack_pass.finish_bias()
        apply(schedule.shared)
        return total

    def _passes(
        self,
        stacks: Sequence[StackSchedule],
        micro_batches: Sequence[MicroBatch],
        backward: Sequence[Weights] = (),
        pool: Pool | None = None,
    ) -> list[StackPass]:
        """One `StackPass` for each stack.

        Args:
            backward: the groups of weights in the order of backward (`Schedule.backward`); empty: forward only.
            pool: of the outputs of the only stack; None: each token has its own.
        """
        upcoming = deque[Weights]([*(stage.weights for stack in stacks for stage in stack.stages), *backward])
        with placed_together():
            return [StackPass(self, stack, micro_batches, upcoming, bool(backward), pool) for stack in stacks]

    def _forward(self, passes: Sequence[StackPass]) -> deque[Tensor]:
        """The output of the last stack (N', D) of each micro-batch."""
        outputs = deque[Tensor]()
        for stack_pass in passes:
            outputs = stack_pass.forward(outputs)
        return outputs

    def _loss(
        self, hidden: deque[Tensor], micro_batches: Sequence[MicroBatch], total_labels: int
    ) -> tuple[Tensor, deque[Tensor]]:
        """The summed loss, and its gradients with respect to `hidden`, whose tensors are freed one after the other."""
        loss_scale = 1.0 if self.scaling is None else self.scaling.scale
        scale = loss_scale / max(1, total_labels)  # `total_labels` is 0 if all labels are masked.
        tables = self.objective.tables(self.model)
        with torch.no_grad(), self.weight_store.for_products(tables):
            # A table may have several trained tensors: itself, and its added token rows under LoRA.
            for part in [part for table in tables for part in parts_of(table) if part.requires_grad]:
                self.weight_store.open_gradient(part)
            return self.objective.losses_and_gradients(
                hidden, self.model.output_weight, micro_batches, scale, self.loss_settings
            )

    @torch.no_grad()
    def loss(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """The summed loss of the micro-batches, without dropout or gradients: evaluation."""
        micro_batches = self.objective.complete(micro_batches, self.token_losses)
        losses = self.token_losses(micro_batches)
        return torch.stack(list(map(self.objective.loss, losses, micro_batches))).sum()

    @torch.no_grad()
    def token_losses(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """The cross-entropy of each token (N',) of each micro-batch, fp32, without dropout."""
        settings = LossSettings(self.loss_settings.chunk_bytes)
        head = self.model.output_weight
        pool = self.objective.pool
        hidden = self._outputs(micro_batches, Schedule(self.model).stacks, pool)
        with self.weight_store.for_products(self.objective.tables(self.model)):
            pairs = zip(hidden, micro_batches, strict=True)
            at_labels = [(x if pool else mb.hidden_at_labels(x), mb) for x, mb in pairs]
            return [self.objective.token_losses(x, head, mb, settings) for x, mb in at_labels]

    @torch.no_grad()
    def predict(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """The output of the label head (`model.label_head.LabelHead`) for each micro-batch, without dropout."""
        label_head = self.model.label_head
        assert label_head is not None, "the model has no head over labels"
        pairs = zip(self._outputs(micro_batches, Schedule(self.model).stacks), micro_batches, strict=True)
        with one_thread():
            return [label_head(mb.hidden_at_labels(x), mb.label_rows) for x, mb in pairs]

    @torch.no_grad()
    def encode(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """The encoder's output of each micro-batch, row after row without padding (N, D), and without dropout."""
        outputs = self._outputs(micro_batches, Schedule(self.model).stacks[:1])
        return [mb.source.tokens(x) for x, mb in zip(outputs, micro_batches, strict=True)]

    @torch.no_grad()
    def embed(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """The vectors of the texts of each micro-batch, fp32 (R, V), by the embedding head, and without dropout."""
        head = self.model.embedding_head
        assert head is not None, "the model has no head that gives vectors"
        with one_thread():
            return list(map(head, self._outputs(micro_batches, Schedule(self.model).stacks, head.pool)))

    def _outputs(
        self, micro_batches: Sequence[MicroBatch], stacks: Sequence[StackSchedule], pool: Pool | None = None
    ) -> deque[Tensor]:
        """Run forward through some stacks, without dropout: the output of the last one, or what `pool` makes of it."""
        follow_machine()
        outputs = self._forward(self._passes(stacks, micro_batches, pool=pool))
        self.heap.trim()
        return outputs

    def zero_gradients(self, weights: Weights) -> None:
        """Set the gradients of weights to zeros, with the shapes and dtypes that `gradients` would give them."""
        as_stored = {id(weight) for weight in Schedule(self.model).used_as_stored}
        with self.weight_store.in_compute_dtype([weight for weight in weights if id(weight) not in as_stored]):
            for weight in weights:
                weight.grad = torch.zeros_like(weight) if weight.requires_grad else None


def keep_gradients(weights: Weights) -> None:
    """Do nothing, in place of an update: gradients stay in `weight.grad` for the next pass or for the caller."""


class StackPass:
    """Forward and backward of all micro-batches through one stack.

    Args:
        blockwise: the model, its weight store and the settings of a pass.
        stack: the stages of this stack.
        upcoming: the weights of all stages that have not run yet, in the order of the whole pass, for prefetching. It
            is shared by the passes of both stacks; each stage removes its own entry when it runs.
        with_backward: whether backward follows; else there is no dropout.
        pool: of the outputs, by the final norm of each micro-batch; None: each token has its own.
    """

    def __init__(
        self,
        blockwise: Blockwise,
        stack: StackSchedule,
        micro_batches: Sequence[MicroBatch],
        upcoming: deque[Weights],
        with_backward: bool,
        pool: Pool | None = None,
    ) -> None:
        self.blockwise = blockwise
        self.embedding = blockwise.model.embedding
        self.stack = stack
        self.module = stack.module
        self.upcoming = upcoming
        self.pool = pool
        # For each stage that backward runs: its checkpointed block for each micro-batch.
        self.checkpoints: list[tuple[Stage, deque[CheckpointedBlock]]] = []
        self.encoder_outputs: list[Tensor] = []
        # One for each micro-batch:
        self.micro_batches = micro_batches
        sides = [mb.side(self.module.is_decoder) for mb in micro_batches]
        self.ids = [side.ids for side in sides]
        self.dropouts = [Dropout(0.0, side.rows) for side in sides]
        self.dropout_keys: list[Tensor | None] = [None for _ in sides]
        # Over all micro-batches:
        self.longest = max((side.rows.longest for side in sides), default=1)
        self.bias: Tensor | None = None
        self.token_sums: TokenSums | None = None
        self.backward_start = len(stack.stages)
        # Index tensors are computed on the host here, before the device starts, which would otherwise wait for them.
        if self.module.bias is not None and not is_host(self.embedding):
            self.module.bias.place_buckets(self.longest)
        if with_backward:
            self._prepare_backward(sides)

    def _prepare_backward(self, sides: Sequence[Side]) -> None:
        rate = self.blockwise.dropout_rate
        adapter_rate = self.blockwise.model.adapter_dropout
        self.backward_start = self.stack.backward_start
        self.dropouts = [Dropout(rate, side.rows, adapter_rate=adapter_rate) for side in sides]
        if rate and self.blockwise.parts is not None:
            sites = [stage.site for stage in self.stack.stages]
            self.dropout_keys = [
                place_dropout_keys(side.rows, sites, self.module.is_decoder, self.embedding.device) for side in sides
            ]
        host_ids = [side.host_ids for side in sides if side.host_ids is not None]
        if host_ids and self.embedding.requires_grad:
            self.token_sums = TokenSums.of(host_ids, self.embedding.device)

    def forward(self, encoder_outputs: deque[Tensor]) -> deque[Tensor]:
        """The stack's output (N, D) of each micro-batch.

        Args:
            encoder_outputs: one for each micro-batch if this stack is a decoder, else empty. This method empties it.
        """
        blockwise = self.blockwise
        inputs = self._inputs(encoder_outputs)
        hidden = self._embedded()
        for index, stage in enumerate(self.stack.stages):
            runs_backward = index >= self.backward_start
            pool = self.pool if stage.is_norm else None
            checkpointed = partial(
                CheckpointedBlock,
                # What pooling reads is as large as an activation, and is recomputed with the blocks.
                is_saved=runs_backward and stage.blocks_left <= blockwise.saved_blocks - (pool is not None),
                dtype=blockwise.residual_dtype,
                needs_input_grad=self.stack.input_needs_grad or index > self.backward_start,
                heap=blockwise.heap,
            )
            with blockwise.weight_store.in_compute_dtype(stage.weights):
                self._prefetch_next(is_last=stage.is_norm)
                functions = [stage.function(each, blockwise, pool) for each in inputs]
                blocks = list(map(checkpointed, functions, hidden))
                dtype = blockwise.weight_store.compute_dtype if stage.is_norm else blockwise.between_blocks_dtype
                hidden = [block.forward().to(torch.float32 if pool else dtype) for block in blocks]
            if runs_backward:
                self.checkpoints.append((stage, deque(blocks)))
        return deque(hidden)

    def backward(self, grads: deque[Tensor], apply: Apply) -> deque[Tensor]:
        """Compute the gradients of all weights of the stack from those of its outputs.

        Args:
            grads: the gradient of the output of each micro-batch. This method empties it.
            apply: called with the weights of each stage once their gradients are complete.
        Returns:
            the gradients of the encoder's outputs; empty for an encoder, or if the encoder needs none.
        """
        while self.checkpoints:
            stage, blocks = self.checkpoints.pop()
            with self.blockwise.weight_store.in_compute_dtype(stage.weights):
                self._prefetch_next(is_last=not self.checkpoints)
                while blocks:
                    grad = blocks.popleft().backward(grads.popleft())
                    if grad is not None:  # It is None in the lowest stage, if nothing below it is trained.
                        grads.append(grad)
            apply(stage.weights)
        if self.stack.input_needs_grad:
            self._embedding_backward(grads)
        grads.clear()
        pairs = zip(self.encoder_outputs, self.micro_batches, strict=False)  # `encoder_outputs` is empty in an encoder.
        output_grads = deque(mb.sum_over_answers(output.grad) for output, mb in pairs if output.grad is not None)
        self.encoder_outputs = []
        return output_grads

    def finish_bias(self) -> None:
        """Backpropagate the gradient of the position bias, summed over all blocks, to its table."""
        if self.module.bias is not None and self.bias is not None and self.bias.grad is not None:
            with torch.enable_grad():
                bias = self.module.bias(self.longest)  # Computed again with a graph, since forward had none.
            # `torch.autograd.backward(bias, grad)` would check shapes with code that imports sympy: 35 MB.
            _backward_root(bias, [self.bias.grad.to(bias.dtype)]).backward()

    def _prefetch_next(self, is_last: bool) -> None:
        """Start to load the weights of the next stage.

        Args:
            is_last: whether the present stage is the last one of this stack in this direction.
        """
        self.upcoming.popleft()
        self.blockwise.weight_store.expect(() if is_last else self.upcoming[0], self.upcoming)

    def _inputs(self, encoder_outputs: deque[Tensor]) -> list[dict[str, Any]]:
        """The arguments of every block other than the hidden states, for each micro-batch."""
        if self.module.bias is not None:
            with torch.no_grad():
                bias: Tensor = self.module.bias(self.longest)
            # A leaf in fp32, whose gradient sums those of all blocks.
            self.bias = bias.requires_grad_(self.module.bias.table.requires_grad)
        pairs = zip(self.dropouts, self.dropout_keys, strict=True)
        inputs: list[dict[str, Any]] = [{"bias": self.bias, "dropout": drop, "keys": keys} for drop, keys in pairs]
        if self.module.is_decoder:
            for each, mb in zip(inputs, self.micro_batches, strict=True):
                leaf = mb.repeat_for_answers(encoder_outputs.popleft()).requires_grad_(self.stack.encoder_needs_grad)
                self.encoder_outputs.append(leaf)
                each.update(encoder_output=leaf, encoder_rows=mb.encoder_output_rows)
        return inputs

    @torch.no_grad()
    def _embedded(self) -> list[Tensor]:
        """The embedded tokens of each micro-batch, after dropout: the input of the first block."""
        hidden = []
        for ids, dropout in zip(self.ids, self.dropouts, strict=True):
            x = self._input_dropout(embed(ids, self.embedding, self.blockwise.residual_dtype), dropout)
            hidden.append(x.to(self.blockwise.between_blocks_dtype))
        return hidden

    def _input_dropout(self, x: Tensor, dropout: Dropout) -> Tensor:
        """Dropout of the embedded tokens. Their gradient goes through the same function, as it gets the same mask."""
        dropout.at(self.module.site).begin(x.device)
        return self.module.enter(x, dropout)

    @torch.no_grad()
    def _embedding_backward(self, grads: deque[Tensor]) -> None:
        """Add the gradients of the embedded tokens to that of the embedding, and under LoRA of the added token rows."""
        weight_store = self.blockwise.weight_store
        for dropout in self.dropouts:
            grads.append(self._input_dropout(grads.popleft(), dropout))
        if self.embedding.requires_grad:
            add_token_gradients(weight_store.open_gradient(self.embedding), self.ids, grads, self.token_sums)
        rows = rows_of(self.embedding)
        if rows is not None and rows[1].requires_grad:
            first, values = rows  # `values` replaces the rows of the embedding from token id `first` on.
            # The buffer is made even without such tokens here, since other processes may have some.
            buffer = weight_store.open_gradient(values)
            for ids, grad in zip(self.ids, grads, strict=True):
                has_row = (ids >= first) & (ids < first + len(values))
                if has_row.any():
                    add_token_gradients(buffer, [ids[has_row] - first], [grad[has_row]])


# --- one block on one micro-batch


class BlockFunction(Protocol):
    """A block with all arguments bound except the hidden states: (N, D) -> (N, D)."""

    def __call__(self, x: Tensor, /, *, graph_only: bool = ...) -> Tensor:
        """With `graph_only` the values of the result are undefined and only its graph counts: what backward does not
        need is not computed.
        """


class CheckpointedBlock:
    """One block on one micro-batch: forward once, backward once.

    Args:
        block: the block with all other arguments bound.
        x: its input, the checkpointed activation; held until backward, or only until forward if the graph is saved.
        is_saved: whether forward keeps the graph for backward; else backward recomputes it.
        dtype: of the residual stream inside the block; x may be stored in a narrower one.
        needs_input_grad: whether the gradient of x is needed; not if nothing below this block is trained.
        heap: trimmed if more memory is free than the next block needs.
    """

    def __init__(
        self,
        block: BlockFunction,
        x: Tensor,
        *,
        is_saved: bool,
        dtype: torch.dtype,
        needs_input_grad: bool,
        heap: HeapTrimmer,
    ) -> None:
        self.block = block
        self.x: Tensor | None = x.detach()
        self.is_saved = is_saved
        self.dtype = dtype
        self.needs_input_grad = needs_input_grad
        self.heap = heap
        self.leaf: Tensor | None = None  # The input of the graph: x in `dtype`.
        self.backward_root: Tensor | None = None  # Of a saved graph: see `_backward_root`.
        self._output_gradient: list[Tensor] = []  # The gradient of the block's output; empty until backward gets it.

    def forward(self) -> Tensor:
        """The block's output, outside of any graph."""
        if not self.is_saved:
            assert self.x is not None
            with torch.no_grad():
                return self.block(self.x.to(self.dtype))
        output = self._run(graph_only=False)
        self.backward_root = _backward_root(output, self._output_gradient)
        self.heap.trim_excess(self.heap.used_bytes())
        return output.detach()

    def backward(self, grad: Tensor) -> Tensor | None:
        """Add to the gradients of the block's weights; returns the gradient of its input, or None if not needed."""
        before = self.heap.used_bytes()
        root = self.backward_root
        self.backward_root = None
        if root is None:
            root = _backward_root(self._run(graph_only=True), self._output_gradient)
            self.heap.trim_excess(before)
        self._output_gradient.append(grad)
        del grad  # It is freed as soon as backward has used it.
        with adding_in_place():
            root.backward()
        assert self.leaf is not None
        grad_x = self.leaf.grad
        assert grad_x is not None or not self.needs_input_grad
        self.leaf = None
        del root
        if self.is_saved:
            self.heap.trim_excess(before)
        return grad_x

    def _run(self, *, graph_only: bool) -> Tensor:
        assert self.x is not None
        self.leaf = self.x.to(self.dtype).requires_grad_(self.needs_input_grad)
        self.x = None
        with torch.enable_grad():
            return self.block(self.leaf, graph_only=graph_only)


class _BackwardRoot(torch.autograd.Function):
    """A scalar; its backward gives x the gradient that the list `gradient` contains at that time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gradient: list[Tensor]) -> Tensor:
        ctx.gradient = gradient
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, one: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient.pop(), None


def _backward_root(output: Tensor, gradient: list[Tensor]) -> Tensor:
    """A scalar whose `backward()` does what `output.backward(gradient[0])` would do.

    It keeps the graph alive but not the output, and `gradient` may be filled after this call.
    """
    with torch.enable_grad():
        return _BackwardRoot.apply(output, gradient)  # type: ignore[no-any-return]


# --- the order of stages


class Stage:
    """One step of a stack: a block, or the final norm, which is treated like a block.

    Args:
        index: in its own stack.
        blocks_left: how many blocks of both stacks remain in forward, this one included; 0 for the last final norm.
    """

    def __init__(self, stack: Stack, module: nn.Module, index: int, blocks_left: int) -> None:
        self.stack = stack
        self.module = module
        self.index = index
        self.blocks_left = blocks_left
        self.weights = list(module.parameters())
        self.is_norm = module is stack.final_norm
        # The number that tells its dropout masks from those of other stages.
        self.site: int = stack.site + 1 if self.is_norm else module.site  # type: ignore[assignment]

    def function(self, inputs: dict[str, Any], blockwise: Blockwise, pool: Pool | None = None) -> BlockFunction:
        """The block with all arguments bound except the hidden states; it has the same dropout masks in each call.

        Args:
            inputs: the other arguments for one micro-batch, as of `StackPass._inputs`; "keys" are the dropout keys of
                all stages of the stack, for compiled blocks.
            pool: of the result; None: as it is.
        """
        arguments = dict(inputs)
        stack_keys = arguments.pop("keys")
        if self.is_norm:
            block = partial(self.stack.leave, dropout=inputs["dropout"])
        elif blockwise.parts is None:
            block = partial(self.module, **arguments, dtype=blockwise.weight_store.compute_dtype)
        else:
            assert isinstance(self.module, Block)
            keys = None if stack_keys is None else stack_keys[self.index].detach()
            block = partial(run_block, blockwise.parts, self.module, **arguments, keys=keys)
        dropout = inputs["dropout"].at(self.site)

        def run(x: Tensor, *, graph_only: bool = False) -> Tensor:
            dropout.begin(x.device)
            output = block(x, graph_only=graph_only)
            return output if pool is None else pool(output, inputs["dropout"].rows)

        return run


class StackSchedule:
    """The stages of one stack, and which of them backward runs.

    Args:
        module: the stack.
        blocks_left: how many blocks of both stacks remain in forward when this stack starts.
        input_needs_grad: whether the gradient of the embedded tokens is needed.
        encoder_needs_grad: for a decoder, whether the gradient of the encoder's output is needed.
    """

    def __init__(self, module: Stack, blocks_left: int, input_needs_grad: bool, encoder_needs_grad: bool) -> None:
        self.module = module
        self.input_needs_grad = input_needs_grad
        self.encoder_needs_grad = encoder_needs_grad
        modules = [*module.blocks, module.final_norm]
        self.stages = [Stage(module, each, index, blocks_left - index) for index, each in enumerate(modules)]
        bias_is_trained = module.bias is not None and module.bias.table.requires_grad
        trained = [stage.index for stage in self.stages if any(weight.requires_grad for weight in stage.weights)]
        # The lowest stage that backward runs; the number of stages if it runs none.
        self.backward_start = min(trained, default=len(self.stages))
        if input_needs_grad or encoder_needs_grad or bias_is_trained:
            self.backward_start = 0

    @property
    def backward_stages(self) -> list[Stage]:
        """The stages that backward runs, in forward order."""
        return self.stages[self.backward_start :]


class Schedule:
    """The order in which a pass uses the weights of a model. It is made for each pass, since `requires_grad` may change
    between passes.

    Backward of a stack ends at its lowest stage that is trained or has something trained below it. The stages under
    that one run forward only and keep no checkpointed activations. A trained embedding is below the first block of both
    stacks, a trained position bias is used by every block of its stack, and a trained encoder feeds every block of the
    decoder through cross-attention: in these cases backward runs through all stages.

    Attributes:
        used_as_stored: weights that are used in the storage dtype, without a copy in the compute dtype.
        shared: weights that belong to no stage; they are updated at the end of a pass.
    """

    def __init__(self, model: T5) -> None:
        modules = model.stacks.values()
        embedding_is_trained = any(part.requires_grad for part in parts_of(model.embedding))
        blocks_left = sum(len(module.blocks) for module in modules)
        encoder_needs_grad = False
        self.stacks: list[StackSchedule] = []
        for module in modules:
            stack = StackSchedule(module, blocks_left, embedding_is_trained, encoder_needs_grad)
            encoder_needs_grad = bool(stack.backward_stages)  # For the decoder, which comes next.
            blocks_left -= len(module.blocks)
            self.stacks.append(stack)
        tables = [module.bias.table for module in modules if module.bias is not None]
        heads = [head for head in (model.label_head, model.embedding_head) if head is not None]
        self.used_as_stored = [*tables, *(weight for head in heads for weight in head.parameters())]
        staged = {id(weight) for group in self.forward() for weight in group}
        self.shared = [weight for weight in model.parameters() if id(weight) not in staged]

    def forward(self) -> list[list[nn.Parameter]]:
        """The weights of each stage in the order of forward."""
        return [stage.weights for stack in self.stacks for stage in stack.stages]

    def backward(self) -> list[list[nn.Parameter]]:
        """Groups of weights in the order in which backward completes their gradients; the same on all processes."""
        stages = [stage for stack in reversed(self.stacks) for stage in reversed(stack.backward_stages)]
        return [*(stage.weights for stage in stages), self.shared]


# --- the loss

# A function that runs forward without gradients or dropout: fp32 losses of the tokens (N',) of each micro-batch.
TokenLosses = Callable[[Sequence[MicroBatch]], Sequence[Tensor]]
# Hidden states (N, D) and their rows -> one state for each row (R, D).
Pool = Callable[[Tensor, Rows], Tensor]


class Objective:
    """Cross-entropy of the label tokens, for pretraining and finetuning. Other objectives override its methods.

    In all methods, hidden states are those of the labels only (`MicroBatch.hidden_at_labels`), or pooled ones.

    Attributes:
        pool: what gives one hidden state for each row; None: each token has its own.
    """

    pool: Pool | None = None

    def tables(self, model: T5) -> list[nn.Parameter]:
        """The weights that hidden states are multiplied by: here the output matrix over the vocabulary."""
        return [model.output_weight]

    def complete(self, micro_batches: Sequence[MicroBatch], token_losses: TokenLosses) -> Sequence[MicroBatch]:
        """Add what the loss needs to the micro-batches, such as log-probabilities under a reference model.

        It is called before the pass has allocated anything.
        """
        return micro_batches

    def losses_and_gradients(
        self,
        hidden: deque[Tensor],
        head: Tensor,
        micro_batches: Sequence[MicroBatch],
        scale: float,
        settings: LossSettings,
    ) -> tuple[Tensor, deque[Tensor]]:
        """The summed loss of all micro-batches of a pass, and the gradients of their hidden states times `scale`.

        Args:
            hidden: the states of all tokens of each micro-batch, or the pooled ones. It is emptied on the way.
        """
        total = hidden[0].new_zeros((), dtype=torch.float32)
        grads = deque[Tensor]()
        for micro_batch in micro_batches:
            at_labels = micro_batch.hidden_at_labels(hidden.popleft())
            loss, grad = self.loss_and_gradients(at_labels, head, micro_batch, scale, settings)
            total += loss
            grads.append(micro_batch.gradient_at_tokens(grad))
        return total, grads

    def loss_and_gradients(
        self, hidden: Tensor, head: Tensor, micro_batch: MicroBatch, scale: float, settings: LossSettings
    ) -> tuple[Tensor, Tensor]:
        """The summed loss of a micro-batch, and the gradient of its hidden states times `scale`.

        Args and returns are those of `model.loss.loss_and_gradients`. The gradient of the head is added to `head.grad`
        if it has one.
        """
        return loss_and_gradients(hidden, head, micro_batch.labels, scale, settings, head.grad)

    def token_losses(self, hidden: Tensor, head: Tensor, micro_batch: MicroBatch, settings: LossSettings) -> Tensor:
        """The fp32 loss of each token (N',) of a micro-batch, without gradients. Args: see `loss_and_gradients`."""
        return token_losses(hidden, head, micro_batch.labels, settings)

    def loss(self, losses: Tensor, micro_batch: MicroBatch) -> Tensor:
        """The summed loss of a micro-batch from its token losses (N',), for evaluation."""
        return sum_of(losses)

    def clear(self) -> None:
        """Reset the metrics."""

    def abort(self) -> bool:
        """This process cannot finish the step. Returns whether the others waited for what the loss compares, and stop
        before any gradient is summed.
        """
        return False

    @property
    def metrics(self) -> dict[str, float]:
        """Further metrics since `clear`, each summed over what the loss is averaged over: labels, or pairs of answers.

        All ranks have the same names.
        """
        return {}
