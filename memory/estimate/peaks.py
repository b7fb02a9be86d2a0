"""The memory of each phase of a run at its highest: phase -> component -> bytes.

What can be counted is counted: weights, gradients, the optimizer's state, checkpointed activations, saved blocks,
logits, and a block's working memory (`memory.estimate.blocks`). What malloc keeps beyond its tensors is a share, fitted
to measured runs. A probe corrects all that is temporary.

Shapes: N source and M target tokens of a micro-batch, D d_model, F d_ff, V vocabulary; e bytes of the compute dtype.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from devices.sizes import (
    COMPARED_BYTES,
    DEVICE_TILE,
    DRAWN_ELEMENTS,
    FILE_CHUNK_BYTES,
    HEAP_BELOW,
    HEAP_EXCESS,
    INT4_GROUP,
    KERNEL_WIDTHS,
    LEAST_WIDENED,
    SAMPLE_TOKENS,
    WIDENED_ELEMENTS,
    loss_chunk_tokens,
    update_elements,
)
from memory.estimate.blocks import NO_ADAPTERS, BlockEstimate, dense_tokens
from memory.estimate.precision import FLOAT16, FLOAT32, INT4, INT8, QUANTIZED, dtype_bytes
from memory.estimate.shapes import MicroBatchRows, Shapes, Tokens
from memory.estimate.weight_offload import mapped_bytes, resident_bytes, slots_bytes
from memory.estimate.workload import COMPILED_BYTES, COMPILER_BYTES, ExecutionPlan, Machine, Workload, state_bytes
from model.row_groups import padded_size
from model.shapes import DECODER, ENCODER, Stack, inner_width, label_head_weights, stacks_of
from settings.optimizers import OPTIMIZERS

STEP_ROWS = "rows of a step"
CORRECTION = "correction"
FIXED = ("base", "weights", "weights at work", "optimizer state", STEP_ROWS)
STEP_PHASES = ("loss", "decoder backward", "encoder backward", "block update", "last update")
CLEANED_BEFORE = ("evaluation", "samples")
LOAD_BYTES = 8 * DRAWN_ELEMENTS  # Buffers while weights are filled: what is drawn, and what it is scaled to.
ID_BYTES = 8
ROW_COPIES = 3  # Token ids are read, laid out for the model, and given once more as labels.
ROW_BYTES = 400  # Python's objects of a row while it is read, its lengths and key.
ROUNDING_BYTES = 21  # Random bits of rounding to bf16, for each element of an update.
# What malloc holds beyond the tensors in use. "small" maps nearly every tensor by itself, and rounds up. With the
# others it is as much as `devices.malloc.HeapTrimmer` lets it hold, and with "fast" also what comes free within one
# block.
SMALL_SHARE = 0.015
PIECES_SHARE = 1.1
COMPARED_COPIES = 3  # The scores of a piece of all texts, which of them are no negatives, and their exponentials.
Parts = dict[str, int]


def predict(work: Workload, choice: ExecutionPlan, machine: Machine) -> dict[str, Parts]:
    """Predict what each phase of a run holds at its highest: phase -> component -> bytes."""
    fixed = _fixed(work, choice, machine)
    step = StepEstimate(work, choice, machine)
    temporary = {"load": {"buffers": LOAD_BYTES}, **step.phases()}
    temporary["evaluation"] = evaluation_parts(work, choice, machine)
    if work.model.output_vocabulary:
        temporary["samples"] = _samples(work, choice, machine)
    temporary["save"] = {"buffers": FILE_CHUNK_BYTES}
    highest = max(sum(temporary[phase].values()) for phase in STEP_PHASES if phase in temporary)
    phases = dict[str, Parts]()
    for phase, parts in temporary.items():
        slack = step.allocator_slack(phase, sum(parts.values()), highest)
        phases[phase] = {**fixed, **parts, "allocator slack": slack}
        if phase in STEP_PHASES:
            phases[phase][STEP_ROWS] = _row_bytes(work, machine)
        if machine.correction != 1.0:
            phases[phase][CORRECTION] = int((machine.correction - 1.0) * changeable(phases[phase]))
    return phases


def changeable(parts: Parts) -> int:
    """The temporary memory of a phase: all but base, weights, optimizer state and rows, before any correction."""
    return sum(size for name, size in parts.items() if name not in (*FIXED, CORRECTION))


def peak_of(phases: dict[str, Parts]) -> tuple[str, int]:
    """The highest phase and its bytes."""
    totals = {phase: sum(parts.values()) for phase, parts in phases.items()}
    highest = max(totals, key=lambda phase: totals[phase])
    return highest, totals[highest]


def _fixed(work: Workload, choice: ExecutionPlan, machine: Machine) -> Parts:
    """What is there in every phase."""
    label_head = sum(weight.size for weight in label_head_weights(work.model))
    fp32_weights = 4 * label_head - label_head * dtype_bytes(choice.storage)
    trained = work.learning
    if trained.adapters:
        # Of embedding and head, only the rows of added tokens are trained beside adapters.
        token_rows = trained.parts["embedding"] + max(0, trained.parts["head"] - label_head)
        fp32_weights += 4 * (trained.adapters + token_rows)
    keeps_compiled_products = machine.base_bytes and choice.compute == "bfloat16" and not machine.widens_whole
    compiler = COMPILER_BYTES if choice.compiled and machine.base_bytes else 0
    return {
        "base": machine.base_bytes,
        "weights": resident_bytes(work, choice) - mapped_bytes(work, choice, machine) + fp32_weights,
        "weights at work": slots_bytes(work, choice, machine),
        "optimizer state": state_bytes(work),
        "libraries": machine.libraries_bytes + (COMPILED_BYTES if keeps_compiled_products else 0) + compiler,
    }


def _row_bytes(work: Workload, machine: Machine) -> int:
    """The rows of a step as they are read, laid out for the model, and with their labels, each as the longest."""
    if not machine.base_bytes:
        return 0  # The host's memory does not count where the device has its own.
    longest = work.step_shapes.longest_row
    return work.rows * (ROW_BYTES + ID_BYTES * ROW_COPIES * (longest.source + longest.target))


def block_of(
    work: Workload, choice: ExecutionPlan, machine: Machine, stack: Stack, *, is_evaluation: bool = False
) -> BlockEstimate:
    """A block at the largest micro-batch of a step, or of an evaluation."""
    shapes = work.evaluation_shapes if is_evaluation else work.step_shapes
    rows = choice.eval_batch_size_per_gpu if is_evaluation else choice.batch_size_per_gpu
    e = dtype_bytes(choice.compute)
    drops = work.dropout and not is_evaluation
    return BlockEstimate(
        model=work.model,
        stack=stack,
        e=e,
        stream=max(e, dtype_bytes(choice.precision.between_blocks)),
        tokens=largest_tokens(shapes, choice, work, machine, is_evaluation=is_evaluation),
        rows=shapes.widest_micro_batch(rows),
        answers=work.answers,
        dropout=drops,
        kernels=attends_compiled(work, choice),
        scores=choice.scores,
        is_fused=machine.fuses_attention,
        adapted=work.adapted,
        compiled=choice.compiled,
    )


def attends_compiled(work: Workload, choice: ExecutionPlan) -> bool:
    """Whether compiled kernels attend, to rows that lie end to end; elsewhere rows are padded."""
    return choice.kernels and work.model.d_kv in KERNEL_WIDTHS


def largest_tokens(
    shapes: Shapes, choice: ExecutionPlan, work: Workload, machine: Machine, *, is_evaluation: bool
) -> Tokens:
    """Tokens of the largest micro-batch, filled up or padded as it lies on the device."""
    rows = choice.eval_batch_size_per_gpu if is_evaluation else choice.batch_size_per_gpu
    if attends_compiled(work, choice):
        return shapes.largest_micro_batch(rows, ((), ()) if is_evaluation else choice.sizes)
    return _padded(shapes.largest_micro_batch(rows), [shapes.widest_micro_batch(rows)], work.answers, machine)


def tokens_together(work: Workload, choice: ExecutionPlan, machine: Machine) -> Tokens:
    """Tokens of all micro-batches of a pass, filled up or padded as they lie on the device."""
    shapes = work.step_shapes
    rows = choice.batch_size_per_gpu
    count = choice.micro_batches_per_pass
    if attends_compiled(work, choice):
        return shapes.together(rows, count, choice.sizes)
    step = shapes.step
    largest = shapes.largest_micro_batch(rows)
    together = Tokens(min(count * largest.source, step.source), min(count * largest.target, step.target))
    return _padded(together, shapes.worst_steps(rows)[0], work.answers, machine)


def _padded(tokens: Tokens, micro_batches: Sequence[MicroBatchRows], answers: int, machine: Machine) -> Tokens:
    """So many tokens with as much padding as these micro-batches have."""
    few_shapes = not machine.fuses_attention
    padded = [dense_tokens(rows, answers, few_shapes) for rows in micro_batches]
    sources, targets = zip(*(lengths for rows in micro_batches for lengths in rows), strict=True)
    return Tokens(
        padded_size(math.ceil(tokens.source * sum(each.source for each in padded) / sum(sources)), few_shapes),
        padded_size(math.ceil(tokens.target * sum(each.target for each in padded) / max(1, sum(targets))), few_shapes),
    )


class StepEstimate:
    """What a training step holds at its highest moments, beside weights and optimizer state."""

    def __init__(self, work: Workload, choice: ExecutionPlan, machine: Machine) -> None:
        model = work.model
        self._work = work
        self._choice = choice
        self._machine = machine
        self._blocks = {stack: block_of(work, choice, machine, stack) for stack in stacks_of(model)}
        self._last_stack: Stack = DECODER if model.num_decoder_layers else ENCODER
        self._tokens = self._blocks[ENCODER].tokens  # The largest micro-batch decides.
        self._is_compiled = attends_compiled(work, choice)
        self._labels = self._tokens.target
        if not self._is_compiled:  # The loss looks at no padding.
            self._labels = padded_size(work.step_shapes.largest_micro_batch(choice.batch_size_per_gpu).target)
        # All micro-batches of a pass go through a block together.
        self._together = tokens_together(work, choice, machine)
        saved_decoder = min(choice.saved_blocks, model.num_decoder_layers)
        self._saved_blocks: dict[Stack, int] = {DECODER: saved_decoder, ENCODER: choice.saved_blocks - saved_decoder}
        self._gradient_bytes = 4 if work.learning.adapters else dtype_bytes(choice.compute)
        # Where gradients have to be held, all of them are counted in all of backward.
        is_held = work.hold_gradients or choice.compute == FLOAT16
        self._has_all_gradients = is_held or choice.accumulation_passes > 1
        self._is_alone = choice.micro_batches_per_pass == 1

    def phases(self) -> dict[str, Parts]:
        """Phase -> component -> bytes, of the phases of a step."""
        model = self._work.model
        phases = {"loss": self._loss()}
        # Gradients that are held grow as activations go: the most is there at the first block of a stack or at the
        # last.
        backward = {DECODER: self._decoder_backward, ENCODER: self._encoder_backward}
        for stack, depth in reversed(stacks_of(model).items()):
            ends = [backward[stack](complete) for complete in (0, depth - 1)]
            phases[f"{stack} backward"] = max(ends, key=lambda parts: sum(parts.values()))
        phases["block update"] = self._block_update()
        phases["last update"] = self._last_update()
        return phases

    def _loss(self) -> Parts:
        """After forward: all checkpointed activations, saved blocks, one chunk of logits, the gradient of the hidden
        states.
        """
        model = self._work.model
        learns = self._work.learns
        trained = learns[model.output_weights]
        activations = self._checkpointed(model.num_layers + 3, 0)
        if model.num_decoder_layers:
            activations = self._checkpointed(model.num_layers + 2, model.num_decoder_layers + 3)
        parts = {
            "gradients": self._gradient_bytes * (learns["total"] if self._choice.accumulation_passes > 1 else trained),
            "checkpointed activations": activations,
            "saved blocks": self._saved(self._saved_blocks[ENCODER], self._saved_blocks[DECODER]),
            "position bias": sum(block.bias_bytes() for block in self._blocks.values()),
        }
        if model.gives_vectors:
            parts["checkpointed activations"] = self._checkpointed(model.num_layers, 0) + self._pooled_norm()
            return {**parts, "vectors": _vectors(self._work, self._machine, self._work.rows)}
        if model.num_labels:
            return {**parts, "label head": _label_head(self._work, self._choice, self._tokens, has_gradient=True)}
        # Hidden states of the tokens that are judged, and their gradient.
        judged = 0 if self._is_compiled else 2 * self._labels * self._stream_bytes()
        return {
            **parts,
            "logits": _logits(self._work, self._choice, self._labels, has_gradient=True) + judged,
            "weights in compute dtype": _head_in_compute_dtype(self._work, self._choice, self._machine, self._labels),
        }

    def _pooled_norm(self) -> int:
        """What the final norm keeps where its output is pooled: its input, and beside saved blocks its graph."""
        if self._saved_blocks[ENCODER]:
            return 2 * self._together.source * self._stream_bytes()
        return self._together.source * self._work.model.d_model * self._narrow_bytes()

    def _decoder_backward(self, complete: int) -> Parts:
        """Inside a decoder block, after the backward of `complete` later ones."""
        model = self._work.model
        # Micro-batches before this one have left the gradient of their encoder output.
        of_others = self._stream_bytes() * (self._together.source - self._tokens.source)
        return {
            **self._backward(DECODER, complete, complete * self._work.learns[DECODER]),
            "checkpointed activations": self._checkpointed(
                model.num_layers + 2, model.num_decoder_layers + 1 - complete
            )
            + of_others,
            "saved blocks": self._saved(self._saved_blocks[ENCODER], max(0, self._saved_blocks[DECODER] - complete)),
            "position bias": self._blocks[ENCODER].bias_bytes(),
        }

    def _encoder_backward(self, complete: int) -> Parts:
        """Inside an encoder block, after the backward of `complete` later ones."""
        model = self._work.model
        learns = self._work.learns
        of_decoder = model.num_decoder_layers * learns[DECODER]
        return {
            **self._backward(ENCODER, complete, of_decoder + complete * learns[ENCODER]),
            "checkpointed activations": self._checkpointed(model.num_layers + 1 - complete, 0),
            "saved blocks": self._saved(max(0, self._saved_blocks[ENCODER] - complete), 0),
        }

    def _backward(self, stack: Stack, complete: int, complete_weights: int) -> Parts:
        """A block at work, its weights in the compute dtype, and the gradients of weights.

        Args:
            complete: later blocks of the stack whose backward is done. complete_weights: of blocks whose gradients are
                complete.
        """
        learns = self._work.learns[stack]
        block = self._blocks[stack]
        # Later micro-batches add to the gradients that the first has left; one alone forms them inside the block.
        is_first = self._is_alone and not self._has_all_gradients
        size = block.backward(learns * self._gradient_bytes if is_first else 0)
        if complete >= self._saved_blocks[stack]:
            size += sum(block.saved(block.tokens))
            own = block.tokens.target if stack == DECODER else block.tokens.source
            e = dtype_bytes(self._choice.compute)
            if self._narrow_bytes() < e:  # The input waited in a narrower dtype.
                size += own * self._work.model.d_model * e
        gradients = self._gradients(0 if self._is_alone else learns, complete_weights)
        if stack == self._last_stack and self._work.model.num_labels and not self._has_all_gradients:
            gradients -= self._work.learns["embedding"] * self._gradient_bytes  # Opened after the blocks of this stack.
        return {
            "gradients": gradients,
            "one block": size,
            "weights in compute dtype": _block_in_compute_dtype(
                self._work, self._choice, self._machine, stack, self._tokens
            ),
        }

    def _block_update(self) -> Parts:
        """The update of the last block of the last stack, in chunks of rows."""
        model = self._work.model
        learns = self._work.learns[self._last_stack]
        saved_blocks = dict(self._saved_blocks)
        saved_blocks[self._last_stack] = max(0, saved_blocks[self._last_stack] - 1)
        activations = self._checkpointed(model.num_layers, 0)
        if model.num_decoder_layers:
            activations = self._checkpointed(model.num_layers + 3, model.num_decoder_layers)
        return {
            "gradients": self._gradients(learns),
            "checkpointed activations": activations,
            "saved blocks": self._saved(saved_blocks[ENCODER], saved_blocks[DECODER]),
            "one update": self._one_update(),
        }

    def _one_update(self) -> int:
        model = self._work.model
        learns = self._work.learns[self._last_stack]
        matrix = model.d_model * max(model.d_ff, inner_width(model))
        elements = min(max(matrix, learns) if self._updates_together else matrix, self._most_updated)
        turned = 0
        if OPTIMIZERS[self._work.optimizer].turns:  # A copy of a whole matrix, and three squares of its shorter side.
            size = min(matrix, learns)
            side = min(model.d_model, size // model.d_model)
            turned = (size + 3 * side**2) * (2 if self._choice.compute == "bfloat16" else 4)
        return self._update_bytes(elements) + turned

    def _last_update(self) -> Parts:
        """The update of embedding and head after the pass; where gradients are held, all of them are there."""
        table = self._work.model.vocab_size * self._work.model.d_model
        learns = self._work.learns
        is_held = self._has_all_gradients or self._choice.hold_gradients
        if is_held and self._updates_together:
            table = min(learns["total"], max(table, self._largest_form()))
        update = self._update_bytes(min(self._most_updated, table))
        of_blocks = learns["total"] - learns["embedding"] - learns["head"]
        return {"gradients": self._gradients(0, of_blocks), "one update": update}

    def _largest_form(self) -> int:
        """Weights of all matrices of blocks that have the shape of which there are most: they are updated together."""
        model = self._work.model
        layers = {ENCODER: model.num_layers, DECODER: model.num_decoder_layers}
        weights = Counter[tuple[int, ...]]()
        for stack in stacks_of(model):
            for shape in self._work.block_matrices[stack]:
                weights[tuple(shape)] += layers[stack] * math.prod(shape)
        return max(weights.values())

    # --- Parts of several phases

    def _stream_bytes(self) -> int:
        """Bytes of one token of the residual stream."""
        return self._work.model.d_model * self._blocks[ENCODER].stream

    def _narrow_bytes(self) -> int:
        """Bytes of one number of an activation between recomputed blocks."""
        return dtype_bytes(self._choice.precision.between_blocks)

    def _saved(self, encoder: int, decoder: int) -> int:
        """The graphs of so many saved blocks, of all micro-batches."""
        counts = {ENCODER: encoder, DECODER: decoder}
        return sum(counts[stack] * sum(block.saved(self._together)) for stack, block in self._blocks.items())

    def _checkpointed(self, encoder: int, decoder: int) -> int:
        """So many activations of each stack; those of recomputed blocks have the dtype between blocks."""
        model = self._work.model
        tokens = encoder * self._together.source + decoder * self._together.target
        if decoder:  # The encoder output and its gradient are there once for each answer.
            tokens += 2 * (self._work.answers - 1) * self._together.source
        is_decoder_recomputed = decoder > 0 and self._choice.saved_blocks < model.num_decoder_layers
        encoder_inputs = model.num_layers - self._saved_blocks[ENCODER] + is_decoder_recomputed
        decoder_inputs = model.num_decoder_layers - self._saved_blocks[DECODER]
        narrow = min(encoder, encoder_inputs) * self._together.source
        narrow += min(max(0, decoder - 1), decoder_inputs) * self._together.target
        return self._stream_bytes() * (tokens - narrow) + model.d_model * self._narrow_bytes() * narrow

    def _gradients(self, block: int, complete_weights: int = 0) -> int:
        """Gradients of weights: of everything, or of head and embedding, of the block under way, and of those that are
        held.
        """
        learns = self._work.learns
        if self._has_all_gradients:
            return learns["total"] * self._gradient_bytes
        if not self._choice.hold_gradients:
            complete_weights = 0
        waiting = 2 if self._machine.num_processes > 1 else 1  # Between several processes one more is on its way.
        return (learns["embedding"] + learns["head"] + block * waiting + complete_weights) * self._gradient_bytes

    @property
    def _updates_together(self) -> bool:
        """Whether matrices of one shape are updated together, as on a GPU (`engine.optimizers.base`)."""
        return self._choice.scores > 0

    @property
    def _most_updated(self) -> int:
        return update_elements(self._choice.scores)

    def _update_bytes(self, elements: int) -> int:
        """Buffers of an update of so many elements at a time."""
        facts = OPTIMIZERS[self._work.optimizer]
        if self._updates_together:
            return elements * facts.together_bytes
        if self._choice.kernels and facts.compiled_update_bytes is not None:
            return elements * facts.compiled_update_bytes
        rounds = self._choice.storage != FLOAT32 and not self._choice.kernels
        return elements * (facts.update_bytes + (ROUNDING_BYTES if rounds else 0))

    # --- What malloc keeps

    def allocator_slack(self, phase: str, temporary: int, highest: int) -> int:
        """What malloc keeps beyond the tensors of a phase.

        Args:
            temporary: bytes that come and go in it. highest: the same of the highest phase of a step.
        """
        malloc = self._choice.malloc
        if phase == "load":
            return 0
        if malloc == "small":
            return int(SMALL_SHARE * temporary)
        share, least = HEAP_EXCESS[malloc]
        if malloc == "untrimmed":
            most = temporary if phase in CLEANED_BEFORE else highest
            return most + max(int(share * most), min(most, least)) - temporary
        if phase == "loss" and self._choice.accumulation_passes == 1:
            pieces = 0  # It is trimmed just before.
        elif phase in ("encoder backward", "last update"):
            pieces = self._small_tensors(ENCODER) + self._one_update()
            is_first = phase == "encoder backward" and self._last_stack == ENCODER and self._saved_blocks[ENCODER]
            if is_first and self._machine.num_processes == 1 and not self._work.adapted.targets:
                # What came free since the trim before the loss takes the place of the last block's graph; adapters free
                # too little, and with several processes the graph waits for its gradients.
                pieces = max(0, pieces - self._saved(1, 0))
        else:
            pieces = self._small_tensors(self._last_stack)
        return least + int(share * temporary + PIECES_SHARE * pieces)

    def _small_tensors(self, stack: Stack) -> int:
        """Of a block at work, the tensors in the heap: its graph, tiles of attention, its gradients and casts.

        Frozen matrices count too: their temporaries are made and freed all the same.
        """
        count = self._choice.micro_batches_per_pass
        block = replace(self._blocks[stack], adapted=NO_ADAPTERS)
        # In several passes malloc serves large tensors, too, from what an earlier pass has left free.
        below = HEAP_BELOW if self._choice.accumulation_passes == 1 else math.inf
        # Tensors of the largest micro-batch may be mapped where those of the others are in the heap.
        typical = Tokens(self._together.source // count, self._together.target // count)
        graph = sum(size for size in block.saved(typical) if size < below) * (count if self._saved_blocks[stack] else 1)
        e = dtype_bytes(self._choice.compute)
        matrices = (math.prod(shape) * e for shape in self._work.block_matrices[stack])
        small = sum(size for size in matrices if size < HEAP_BELOW)
        casts = min(small, _block_in_compute_dtype(self._work, self._choice, self._machine, stack, self._tokens))
        tile = max(each.tile() for each in self._blocks.values())
        return graph + tile + min(small, self._work.learns[stack] * e) + casts


def _widens_in_pieces(choice: ExecutionPlan, machine: Machine) -> bool:
    return dtype_bytes(choice.storage) < dtype_bytes(choice.compute) and not machine.widens_whole


def _head_in_compute_dtype(work: Workload, choice: ExecutionPlan, machine: Machine, tokens: int) -> int:
    """The head in the compute dtype: where products widen it as they go, a piece and the logits of that piece."""
    if choice.storage == choice.compute:
        return 0
    model = work.model
    e = dtype_bytes(choice.compute)
    rows = WIDENED_ELEMENTS // model.d_model
    if not _widens_in_pieces(choice, machine) or rows >= model.vocab_size:
        return model.vocab_size * model.d_model * e
    return rows * (model.d_model + _chunk_tokens(work, choice, tokens)) * e


def _block_in_compute_dtype(
    work: Workload, choice: ExecutionPlan, machine: Machine, stack: Stack, tokens: Tokens
) -> int:
    """The matrices of a block in the compute dtype: all of them, but of quantized ones those of one product."""
    e = dtype_bytes(choice.compute)
    if choice.storage == choice.compute:
        return 0
    if choice.storage not in QUANTIZED:
        return work.counts[stack] * e
    # Without kernels int4 also takes the positions of its levels, and levels without their scales.
    element_bytes = e if choice.kernels or choice.storage == INT8 else 2 + 2 * e
    if machine.widens_whole:
        return element_bytes * max(math.prod(shape) for shape in work.block_matrices[stack])
    most = max(tokens.source, tokens.target)
    return element_bytes * max(_widened(shape, choice.storage, most) for shape in work.block_matrices[stack])


def _widened(shape: tuple[int, ...], storage: str, tokens: int) -> int:
    """Elements of a quantized matrix that a product widens at a time (`model.quantization`), and of what it gives for
    them.
    """
    rows, columns = shape
    of_rows = min(rows, max(LEAST_WIDENED, WIDENED_ELEMENTS // columns))
    of_columns = min(columns, max(INT4_GROUP, WIDENED_ELEMENTS // rows)) if storage == INT4 else 0
    return max(of_rows * (columns + tokens), of_columns * (rows + tokens))


def _logits(work: Workload, choice: ExecutionPlan, tokens: int, has_gradient: bool) -> int:
    """One chunk: fp32 logits, and beside them the product or the gradient where that is of another dtype; with compiled
    kernels the product alone, which becomes the gradient.
    """
    model = work.model
    narrow = 0 if choice.compute == FLOAT32 else 2
    wide = 0 if choice.kernels and narrow else 4
    size = _chunk_tokens(work, choice, tokens) * model.vocab_size * (wide + narrow)
    is_trained = has_gradient and work.learns["embedding"] + work.learns["head"] > 0
    if narrow and is_trained and choice.storage != choice.compute:
        size += 4 * model.d_model * model.vocab_size
    return size


def _chunk_tokens(work: Workload, choice: ExecutionPlan, tokens: int) -> int:
    tile = DEVICE_TILE if choice.scores else 1
    return min(loss_chunk_tokens(choice.loss_chunk_bytes, work.model.vocab_size, tile), max(1, tokens))


def _label_head(work: Workload, choice: ExecutionPlan, tokens: Tokens, has_gradient: bool) -> int:
    """A head over labels on one micro-batch: fp32 copies of its hidden states, what its layers save, and their
    gradients.
    """
    model = work.model
    own = tokens.target if model.num_decoder_layers else tokens.source
    copies = int(choice.compute != FLOAT32) + 2 * has_gradient  # The hidden states are counted as activations.
    if model.pools_rows:  # Its layers see a few pooled rows.
        return 4 * own * model.d_model * copies
    layers = 1 + model.has_dense_head
    copies += 2 * model.has_dense_head + has_gradient * work.dropout * layers
    return 4 * own * (model.d_model * copies + model.num_labels * 3)


def _vectors(work: Workload, machine: Machine, rows: int) -> int:
    """The vectors of the texts of so many rows here, pooled and as the head gives them, with their gradients; those of
    all processes, of length 1, with theirs; and a piece of the scores of all with all.
    """
    texts = math.ceil(rows * work.texts)
    together = texts * machine.num_processes
    piece = min(COMPARED_BYTES, 4 * together**2)
    size = work.model.vector_size
    return 4 * (texts * (3 * work.model.d_model + size) + together * 3 * size) + COMPARED_COPIES * piece


def evaluation_parts(work: Workload, choice: ExecutionPlan, machine: Machine) -> Parts:
    """One evaluation batch on its way through the widest block or the head."""
    model = work.model
    blocks = [block_of(work, choice, machine, stack, is_evaluation=True) for stack in stacks_of(model)]
    tokens = blocks[0].tokens
    token = model.d_model * blocks[0].stream
    between = 2 * (tokens.source + tokens.target) * token
    sizes = [_block_in_compute_dtype(work, choice, machine, stack, tokens) for stack in stacks_of(model)]
    if model.output_vocabulary:
        head = _logits(work, choice, tokens.target, has_gradient=False)
        sizes.append(_head_in_compute_dtype(work, choice, machine, tokens.target))
    else:
        head = _label_head(work, choice, tokens, has_gradient=False)
        if model.gives_vectors:  # Those of all rows of an evaluation are compared.
            between += _vectors(work, machine, work.evaluation_shapes.sources.size)
    working = max(block.forward() for block in blocks)
    return {"one block": max(working, head) + between, "weights in compute dtype": max(sizes)}


def _samples(work: Workload, choice: ExecutionPlan, machine: Machine) -> Parts:
    """A few answers at the end: keys and values of what is read and written, and one row of logits each."""
    model = work.model
    e = dtype_bytes(choice.compute)
    rows = work.sample_rows
    longest = work.evaluation_shapes.longest_row.source
    cast = 0
    if choice.storage != choice.compute:
        cast = _head_in_compute_dtype(work, choice, machine, rows)
        if not _widens_in_pieces(choice, machine):
            cast = max(cast, e * work.counts[ENCODER], e * work.counts[DECODER])
    keys_and_values = model.num_decoder_layers * 2 * inner_width(model) * rows * (longest + SAMPLE_TOKENS)
    return {
        "keys and values": e * keys_and_values,
        "one block": rows * longest * e * (5 * model.d_model + 3 * model.d_ff) + rows * model.vocab_size * 8,
        "weights in compute dtype": cast,
    }
