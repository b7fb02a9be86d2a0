"""One pass over a model, block by block: the two nested loops of a training step.

    forward:   for each block: for each micro-batch: run it; keep its input (a checkpointed activation) or its graph
    loss:      in chunks of tokens, for each micro-batch; the head's gradient goes into one buffer
    backward:  for each block from the last to the first: for each micro-batch: recompute if needed; backward through
        this block;
               then the optimizer in backward: all-reduce -> finite check -> update -> free the gradients
    shared:    embedding, heads and position bias gather their gradients on the way and are updated at the end

What a step holds is exactly: the checkpointed activations of all micro-batches, the graphs of saved blocks, one
micro-batch's activations of one block, one block's gradients, and those of the shared weights. Gradients equal those of
plain autograd over `T5.forward`, whatever the micro-batches and the plan (tests hold it).

Gradient checkpointing: the last blocks of a pass keep their graphs for backward, the earlier ones are recomputed. A
saved block costs its activations for the time between; a recomputed one keeps only its input, the checkpointed
activation, and costs one more forward, without the block's last product, whose result backward does not need. Both give
the same numbers: dropout is a function of the row and the position, never of a generator's state. No
`torch.utils.checkpoint`: its first call imports the compiler front end, 80 MB. Source: Chen et al. 2016 (arXiv
1604.06174).
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
from model.t5 import T5, Block, Stack

Apply = Callable[[Weights], object]


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
        between_blocks_dtype: of what passes between blocks; None: that of the residual stream. Where products are fp32
            for lack of fast bf16 ones, bf16 halves what these activations take, and rounds as products in bf16 would.
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
        self.model = model
        self.saved_blocks = saved_blocks
        self.weight_store = weight_store
        self.loss_settings = loss
        self.dropout_rate = dropout_rate
        self.objective = objective or Objective()
        self.scaling = scaling
        self.residual_dtype = residual_dtype(weight_store.compute_dtype)  # The dtype of the stream inside of a block.
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
        """Form the gradient of sum(loss) / total_labels over all micro-batches, and update each block when its own is
        complete.

        Args:
            micro_batches: that pass through each block together.
            total_labels: labels (or pairs of answers) of the whole effective batch, over all micro-batches and
                processes.
            update: applies the gradients; None: they stay.
            is_last: False: the gradients stay, and the next pass adds to them.
        Returns:
            the summed loss, a fp32 scalar on the device.
        """
        apply = update.apply if update is not None and is_last else keep_gradients
        self.heap.trim()
        schedule = Schedule(self.model)
        micro_batches = self.objective.complete(micro_batches, self.token_losses)
        passes = self._passes(schedule.stacks, micro_batches, schedule.backward())
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
        self, stacks: Sequence[StackSchedule], micro_batches: Sequence[MicroBatch], backward: Sequence[Weights] = ()
    ) -> list[StackPass]:
        """The passes of these micro-batches through some stacks; without groups of weights for backward, forward
        alone.
        """
        upcoming = deque[Weights]([*(stage.weights for stack in stacks for stage in stack.stages), *backward])
        with placed_together():
            return [StackPass(self, stack, micro_batches, upcoming, bool(backward)) for stack in stacks]

    def _forward(self, passes: Sequence[StackPass]) -> deque[Tensor]:
        """The output of the last stack (N', D) of each micro-batch."""
        outputs = deque[Tensor]()
        for stack_pass in passes:
            outputs = stack_pass.forward(outputs)
        return outputs

    def _loss(
        self, hidden: deque[Tensor], micro_batches: Sequence[MicroBatch], total_labels: int
    ) -> tuple[Tensor, deque[Tensor]]:
        """The summed loss, and the gradients of the hidden states, which are freed micro-batch by micro-batch."""
        total = hidden[0].new_zeros((), dtype=torch.float32)
        loss_scale = 1.0 if self.scaling is None else self.scaling.scale
        scale = loss_scale / max(1, total_labels)  # A batch whose labels are all masked has none.
        grads = deque[Tensor]()
        head = self.model.output_weight
        tables = self.objective.tables(self.model)
        with torch.no_grad(), self.weight_store.for_products(tables):
            for part in [part for table in tables for part in parts_of(table) if part.requires_grad]:
                self.weight_store.open_gradient(part)
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
        return torch.stack(list(map(self.objective.loss, losses, micro_batches))).sum()

    @torch.no_grad()
    def token_losses(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """The cross-entropy of each token (N',) of each micro-batch, fp32, without dropout."""
        settings = LossSettings(self.loss_settings.chunk_bytes)
        head = self.model.output_weight
        hidden = self._outputs(micro_batches, Schedule(self.model).stacks)
        with self.weight_store.for_products(self.objective.tables(self.model)):
            pairs = zip(hidden, micro_batches, strict=True)
            return [self.objective.token_losses(mb.judged(x), head, mb, settings) for x, mb in pairs]

    @torch.no_grad()
    def predict(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """What the head over labels makes of each micro-batch, without dropout, as of `model.label_head.LabelHead`."""
        label_head = self.model.label_head
        assert label_head is not None, "the model has no head over labels"
        pairs = zip(self._outputs(micro_batches, Schedule(self.model).stacks), micro_batches, strict=True)
        with one_thread():
            return [label_head(mb.judged(x), mb.label_rows) for x, mb in pairs]

    @torch.no_grad()
    def encode(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """The encoder's output of each micro-batch, row after row without padding (N, D), and without dropout."""
        outputs = self._outputs(micro_batches, Schedule(self.model).stacks[:1])
        return [mb.source.tokens(x) for x, mb in zip(outputs, micro_batches, strict=True)]

    def _outputs(self, micro_batches: Sequence[MicroBatch], stacks: Sequence[StackSchedule]) -> deque[Tensor]:
        """The output of the last of some stacks, without dropout."""
        follow_machine()
        outputs = self._forward(self._passes(stacks, micro_batches))
        self.heap.trim()
        return outputs

    def zero_gradients(self, weights: Weights) -> None:
        """Give weights the gradients of their shapes and dtypes that `gradients` would hand over, all zero."""
        as_stored = {id(weight) for weight in Schedule(self.model).used_as_stored}
        with self.weight_store.in_compute_dtype([weight for weight in weights if id(weight) not in as_stored]):
            for weight in weights:
                weight.grad = torch.zeros_like(weight) if weight.requires_grad else None


def keep_gradients(weights: Weights) -> None:
    """Leave gradients where they are: another pass adds to them, or somebody else reads them."""


class StackPass:
    """All micro-batches on their way through one stack, forward and back.

    Args:
        blockwise: the model and how it is passed. stack: the stages of this stack.
        micro_batches: in their order. upcoming: the weights of all stages to come, in both stacks; each is taken off
            when used.
        with_backward: whether backward follows.
    """

    def __init__(
        self,
        blockwise: Blockwise,
        stack: StackSchedule,
        micro_batches: Sequence[MicroBatch],
        upcoming: deque[Weights],
        with_backward: bool,
    ) -> None:
        self.blockwise = blockwise
        self.embedding = blockwise.model.embedding
        self.stack = stack
        self.module = stack.module
        self.upcoming = upcoming
        # For each stage that learns, what backward needs: its block on each micro-batch.
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
        self.first_learning = len(stack.stages)
        # What is made on the host is made here, before anything runs: it has time while the device computes.
        if self.module.bias is not None and not is_host(self.embedding):
            self.module.bias.place_buckets(self.longest)
        if with_backward:
            self._prepare_backward(sides)

    def _prepare_backward(self, sides: Sequence[Side]) -> None:
        rate = self.blockwise.dropout_rate
        adapter_rate = self.blockwise.model.adapter_dropout
        self.first_learning = self.stack.first_learning
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
            encoder_outputs: of each micro-batch, for a decoder; is emptied.
        """
        blockwise = self.blockwise
        inputs = self._inputs(encoder_outputs)
        hidden = self._embedded()
        for index, stage in enumerate(self.stack.stages):
            learns = index >= self.first_learning
            checkpointed = partial(
                CheckpointedBlock,
                is_saved=learns and stage.blocks_left <= blockwise.saved_blocks,
                dtype=blockwise.residual_dtype,
                needs_input=self.stack.entry_learns or index > self.first_learning,
                heap=blockwise.heap,
            )
            with blockwise.weight_store.in_compute_dtype(stage.weights):
                self._expect_next(is_last=stage.is_norm)
                functions = [stage.function(each, blockwise) for each in inputs]
                blocks = list(map(checkpointed, functions, hidden))
                dtype = blockwise.weight_store.compute_dtype if stage.is_norm else blockwise.between_blocks_dtype
                hidden = [block.forward().to(dtype) for block in blocks]
            if learns:
                self.checkpoints.append((stage, deque(blocks)))
        return deque(hidden)

    def backward(self, grads: deque[Tensor], apply: Apply) -> deque[Tensor]:
        """From the gradients of the outputs to those of all weights of the stack.

        Args:
            grads: one a micro-batch; is emptied. apply: called with each stage's weights when their gradients are
                complete.
        Returns:
            of a decoder, the gradients of the encoder's outputs, where those learn.
        """
        while self.checkpoints:
            stage, blocks = self.checkpoints.pop()
            with self.blockwise.weight_store.in_compute_dtype(stage.weights):
                self._expect_next(is_last=not self.checkpoints)
                while blocks:
                    grad = blocks.popleft().backward(grads.popleft())
                    if grad is not None:  # Else backward ends here: nothing below learns.
                        grads.append(grad)
            apply(stage.weights)
        if self.stack.entry_learns:
            self._embedding_backward(grads)
        grads.clear()
        pairs = zip(self.encoder_outputs, self.micro_batches, strict=False)  # An encoder has no such outputs.
        gathered = deque(mb.gather(output.grad) for output, mb in pairs if output.grad is not None)
        self.encoder_outputs = []
        return gathered

    def finish_bias(self) -> None:
        """Take the gradient that the blocks have gathered in the bias back to its table."""
        if self.module.bias is not None and self.bias is not None and self.bias.grad is not None:
            with torch.enable_grad():
                bias = self.module.bias(self.longest)  # This one has a graph, which forward has left out.
            # `torch.autograd.backward(bias, grad)` would check shapes with code that imports sympy: 35 MB.
            _seed(bias, [self.bias.grad.to(bias.dtype)]).backward()

    def _expect_next(self, is_last: bool) -> None:
        self.upcoming.popleft()
        self.blockwise.weight_store.expect(() if is_last else self.upcoming[0], self.upcoming)

    def _inputs(self, encoder_outputs: deque[Tensor]) -> list[dict[str, Any]]:
        """What the blocks take for each micro-batch, beside their input."""
        if self.module.bias is not None:
            with torch.no_grad():
                bias: Tensor = self.module.bias(self.longest)
            # A leaf in fp32, in which the gradients of all blocks add up.
            self.bias = bias.requires_grad_(self.module.bias.table.requires_grad)
        pairs = zip(self.dropouts, self.dropout_keys, strict=True)
        inputs: list[dict[str, Any]] = [{"bias": self.bias, "dropout": each, "keys": keys} for each, keys in pairs]
        if self.module.is_decoder:
            for each, mb in zip(inputs, self.micro_batches, strict=True):
                leaf = mb.spread(encoder_outputs.popleft()).requires_grad_(self.stack.encoder_learns)
                self.encoder_outputs.append(leaf)
                each.update(encoder_output=leaf, encoder_rows=mb.encoder_output_rows)
        return inputs

    @torch.no_grad()
    def _embedded(self) -> list[Tensor]:
        hidden = []
        for ids, dropout in zip(self.ids, self.dropouts, strict=True):
            x = self._entered(embed(ids, self.embedding, self.blockwise.residual_dtype), dropout)
            hidden.append(x.to(self.blockwise.between_blocks_dtype))
        return hidden

    def _entered(self, x: Tensor, dropout: Dropout) -> Tensor:
        """Dropout of the embedded tokens, or with the same mask of their gradient."""
        dropout.at(self.module.site).begin(x.device)
        return self.module.enter(x, dropout)

    @torch.no_grad()
    def _embedding_backward(self, grads: deque[Tensor]) -> None:
        """Add the gradient of the embedded tokens into the one embedding buffer, row by row."""
        weight_store = self.blockwise.weight_store
        for dropout in self.dropouts:
            grads.append(self._entered(grads.popleft(), dropout))
        if self.embedding.requires_grad:
            add_token_gradients(weight_store.open_gradient(self.embedding), self.ids, grads, self.token_sums)
        rows = rows_of(self.embedding)
        if rows is not None and rows[1].requires_grad:
            first, values = rows
            buffer = weight_store.open_gradient(values)  # Other processes may have such tokens where this one has none.
            for ids, grad in zip(self.ids, grads, strict=True):
                is_row = (ids >= first) & (ids < first + len(values))
                if is_row.any():
                    add_token_gradients(buffer, [ids[is_row] - first], [grad[is_row]])


# --- one block on one micro-batch


class BlockFunction(Protocol):
    """One block with everything but its input given: (N, D) -> (N, D)."""

    def __call__(self, x: Tensor, /, *, graph_only: bool = ...) -> Tensor:
        """With `graph_only` the result stands for its graph alone, and what backward does not need is left out."""


class CheckpointedBlock:
    """One block on one micro-batch: forward once, backward once.

    Args:
        block: the function of the block.
        x: its input; held until backward (the checkpointed activation), or until there is a saved graph.
        is_saved: whether the graph stays until backward.
        dtype: of the residual stream in the block; x may wait in a narrower one.
        needs_input: whether the gradient of x is needed; not below the lowest block that is trained.
        heap: trimmed where more is free than one block works with.
    """

    def __init__(
        self,
        block: BlockFunction,
        x: Tensor,
        *,
        is_saved: bool,
        dtype: torch.dtype,
        needs_input: bool,
        heap: HeapTrimmer,
    ) -> None:
        self.block = block
        self.x: Tensor | None = x.detach()
        self.is_saved = is_saved
        self.dtype = dtype
        self.needs_input = needs_input
        self.heap = heap
        self.entry: Tensor | None = None  # The leaf of the graph: x in that dtype.
        self.seed: Tensor | None = None  # Backward through a saved graph starts here, without the block's output.
        self._output_gradient: list[Tensor] = []  # Empty until it is known.

    def forward(self) -> Tensor:
        """The block's output, outside of any graph."""
        if not self.is_saved:
            assert self.x is not None
            with torch.no_grad():
                return self.block(self.x.to(self.dtype))
        output = self._run(graph_only=False)
        self.seed = _seed(output, self._output_gradient)
        self.heap.trim_excess(self.heap.used_bytes())
        return output.detach()

    def backward(self, grad: Tensor) -> Tensor | None:
        """Add to the gradients of the block's weights; return the gradient of its input, None where it is not
        needed.
        """
        before = self.heap.used_bytes()
        seed = self.seed
        self.seed = None
        if seed is None:
            seed = _seed(self._run(graph_only=True), self._output_gradient)
            self.heap.trim_excess(before)
        self._output_gradient.append(grad)
        del grad  # It is freed as soon as backward has used it.
        with adding_in_place():
            seed.backward()
        assert self.entry is not None
        grad_x = self.entry.grad
        assert grad_x is not None or not self.needs_input
        self.entry = None
        del seed
        if self.is_saved:
            self.heap.trim_excess(before)
        return grad_x

    def _run(self, *, graph_only: bool) -> Tensor:
        assert self.x is not None
        self.entry = self.x.to(self.dtype).requires_grad_(self.needs_input)
        self.x = None
        with torch.enable_grad():
            return self.block(self.entry, graph_only=graph_only)


class _Seed(torch.autograd.Function):
    """A scalar whose gradient with respect to x is the one that `gradient` holds by then."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gradient: list[Tensor]) -> Tensor:
        ctx.gradient = gradient
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, one: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient.pop(), None


def _seed(output: Tensor, gradient: list[Tensor]) -> Tensor:
    """A scalar from which backward starts at `output`, with the one tensor in `gradient`. It holds the graph, not the
    output.
    """
    with torch.enable_grad():
        return _Seed.apply(output, gradient)  # type: ignore[no-any-return]


# --- the order of stages


class Stage:
    """A block, or the norm after the last one, which is as good as a block.

    Args:
        index: in its own stack. blocks_left: those of both stacks from this one on; of the norm of the last stack 0.
    """

    def __init__(self, stack: Stack, module: nn.Module, index: int, blocks_left: int) -> None:
        self.stack = stack
        self.module = module
        self.index = index
        self.blocks_left = blocks_left
        self.weights = list(module.parameters())
        self.is_norm = module is stack.final_norm
        self.site: int = stack.site + 1 if self.is_norm else module.site  # type: ignore[assignment]

    def function(self, inputs: dict[str, Any], blockwise: Blockwise) -> BlockFunction:
        """The block with everything but its input given; each time that it runs it drops the same.

        Args:
            inputs: what it takes beside its input, the keys of dropout being those of all compiled blocks of the stack.
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
            return block(x, graph_only=graph_only)

        return run


class StackSchedule:
    """The stages of one stack.

    Args:
        module: the stack. blocks_left: those of both stacks from its first one on.
        entry_learns: whether the gradient of the stack's input is wanted.
        encoder_learns: of a decoder, whether the encoder needs the gradients of all of its blocks.
    """

    def __init__(self, module: Stack, blocks_left: int, entry_learns: bool, encoder_learns: bool) -> None:
        self.module = module
        self.entry_learns = entry_learns
        self.encoder_learns = encoder_learns
        modules = [*module.blocks, module.final_norm]
        self.stages = [Stage(module, each, index, blocks_left - index) for index, each in enumerate(modules)]
        bias_learns = module.bias is not None and module.bias.table.requires_grad
        learning = [stage.index for stage in self.stages if any(weight.requires_grad for weight in stage.weights)]
        # The lowest stage that backward runs; the number of stages where it runs none.
        self.first_learning = min(learning, default=len(self.stages))
        if entry_learns or encoder_learns or bias_learns:
            self.first_learning = 0

    @property
    def learning(self) -> list[Stage]:
        """The stages that backward runs, in forward order."""
        return self.stages[self.first_learning :]


class Schedule:
    """The order in which a pass needs the weights of a model. Made anew for each pass: what learns may change in
    between.

    Backward ends at the lowest stage of a stack below which nothing learns: what lies further down runs forward only,
    has no checkpointed activations and runs once. The embedding lies below the first block of both stacks, a shared
    position bias is used in every block of its own, and the encoder lies below every block of the decoder, by way of
    its cross-attention.
    """

    def __init__(self, model: T5) -> None:
        modules = model.stacks.values()
        embeds = any(part.requires_grad for part in parts_of(model.embedding))
        blocks_left = sum(len(module.blocks) for module in modules)
        encoder_learns = False
        self.stacks: list[StackSchedule] = []
        for module in modules:
            stack = StackSchedule(module, blocks_left, embeds, encoder_learns)
            encoder_learns = bool(stack.learning)
            blocks_left -= len(module.blocks)
            self.stacks.append(stack)
        tables = [module.bias.table for module in modules if module.bias is not None]
        label_weights = [] if model.label_head is None else list(model.label_head.parameters())
        self.used_as_stored = [*tables, *label_weights]
        staged = {id(weight) for group in self.forward() for weight in group}
        self.shared = [weight for weight in model.parameters() if id(weight) not in staged]

    def forward(self) -> list[list[nn.Parameter]]:
        """The weights of each stage in the order of forward."""
        return [stage.weights for stack in self.stacks for stage in stack.stages]

    def backward(self) -> list[list[nn.Parameter]]:
        """The groups of weights in the order in which backward completes their gradients: the same on all processes."""
        stages = [stage for stack in reversed(self.stacks) for stage in reversed(stack.learning)]
        return [*(stage.weights for stage in stages), self.shared]


# --- what is minimised

# A forward without gradients or dropout: the loss of each token (N',), fp32, of each micro-batch.
TokenLosses = Callable[[Sequence[MicroBatch]], Sequence[Tensor]]


class Objective:
    """The cross-entropy of each label token: pretraining and finetuning. Others override what differs.

    Hidden states are those of `MicroBatch.label_rows`.
    """

    def tables(self, model: T5) -> list[nn.Parameter]:
        """The tables over the vocabulary that hidden states are multiplied by."""
        return [model.output_weight]

    def complete(self, micro_batches: Sequence[MicroBatch], token_losses: TokenLosses) -> Sequence[MicroBatch]:
        """Give the micro-batches with all that the loss needs; called before the pass holds anything."""
        return micro_batches

    def loss_and_gradients(
        self, hidden: Tensor, head: Tensor, micro_batch: MicroBatch, scale: float, settings: LossSettings
    ) -> tuple[Tensor, Tensor]:
        """The summed loss of a micro-batch, and the gradient of its hidden states times `scale`.

        Args and returns as of `model.loss.loss_and_gradients`; the head's gradient is added to the one that it has, if
        any.
        """
        return loss_and_gradients(hidden, head, micro_batch.labels, scale, settings, head.grad)

    def token_losses(self, hidden: Tensor, head: Tensor, micro_batch: MicroBatch, settings: LossSettings) -> Tensor:
        """The loss of each token (N',) of a micro-batch, fp32, without gradients; arguments as of
        `loss_and_gradients`.
        """
        return token_losses(hidden, head, micro_batch.labels, settings)

    def loss(self, losses: Tensor, micro_batch: MicroBatch) -> Tensor:
        """The summed loss of a micro-batch from its token losses (N',): evaluation."""
        return sum_of(losses)

    def clear(self) -> None:
        """Begin to count metrics anew."""

    @property
    def metrics(self) -> dict[str, float]:
        """Further figures since `clear`, each a sum over what the loss is averaged over; the same names on all
        ranks.
        """
        return {}
