"""The memory of each phase of a run at its highest: phase -> component -> bytes.

peak = base + weights + optimizer state + what the phase holds + what malloc keeps beyond its tensors. A step holds so little
that it is counted, line by line as `engine/` makes it: gradients of one block and of the shared weights, checkpointed
activations, saved blocks, one block's working memory (`memory.estimate.blocks`), one chunk of logits. e is the bytes of the
compute dtype. Sharded weights (FSDP) and weight offload change the parts at the end.

Shapes: N source tokens and M target tokens of a micro-batch, D d_model, I = H K inner width of attention, F d_ff,
V vocabulary, L layers.
"""

from __future__ import annotations

import math
from dataclasses import replace

from limits import (
    DEVICE_TILE,
    DRAWN_ELEMENTS,
    FILE_CHUNK_BYTES,
    HEAP_BELOW,
    HEAP_EXCESS,
    INT4_GROUP,
    KERNEL_WIDTHS,
    LEAST_WIDENED,
    SAMPLE_TOKENS,
    SLAB_BYTES,
    WIDENED_ELEMENTS,
    loss_chunk_tokens,
    update_elements,
)
from memory.estimate.blocks import NO_ADAPTERS, Blocks
from memory.estimate.precision import INT4, INT8, QUANTIZED, dtype_bytes
from memory.estimate.shapes import Sizes, Tokens
from memory.estimate.weight_offload import mapped_bytes, resident_bytes, slots_bytes
from memory.estimate.workload import COMPILED_BYTES, ExecutionPlan, Machine, Workload, state_bytes
from model.shapes import inner_width, label_head_weights, stacks_of
from optimizers import OPTIMIZERS
from settings.consistency import SEQUENCE

ROWS, CORRECTION = "rows of a step", "correction"
FIXED = ("base", "weights", "weights at work", "optimizer state", ROWS)
STEP_PHASES = ("loss", "decoder backward", "encoder backward", "block update", "last update")
LOAD_BYTES = 8 * DRAWN_ELEMENTS  # buffers while weights are filled: what is drawn, and what it is scaled to
SAVE_BYTES = FILE_CHUNK_BYTES  # while they are written
ID_BYTES = 8
ROW_BYTES = 400  # of a row beside its tokens: Python's objects, while it is read; its lengths and key
STATE_BYTES = 4  # of a number of the optimizer's state, which is gathered for a save as weights are
ROUNDING_BYTES = 21  # buffers of the random bits of rounding to bf16, for each element of an update
NO_SIZES: Sizes = ((), ())  # evaluation's micro-batches are filled up on a scale of their own
# What malloc holds beyond the tensors that are there: one margin a mode, which a probe corrects with all that is temporary.
# "small" maps nearly every tensor by itself, and rounds up. With the others as much as `devices.malloc.HeapTrimmer` lets it hold;
# with "fast", which has tensors below 4 MiB in the heap, also what comes free within one block, in front of which nothing is trimmed.
SMALL_SHARE, PIECES_SHARE = 0.015, 1.1
CLEANED_BEFORE = ("evaluation", "samples")


def predict(work: Workload, choice: ExecutionPlan, machine: Machine) -> dict[str, dict[str, int]]:
    """Predict what each phase of a run holds at its highest: phase -> component -> bytes."""
    is_host = machine.base_bytes > 0  # nothing in the host's memory counts where the device has its own
    compiles = choice.compute == "bfloat16" and not machine.widens_whole  # oneDNN's products; those of fp32 are MKL's
    fixed = {
        "base": machine.base_bytes,
        "weights": resident_bytes(work, choice) - mapped_bytes(work, choice, machine) + _fp32_beside(work, choice),
        "weights at work": slots_bytes(work, choice, machine),
        "optimizer state": state_bytes(work, choice.storage),
        "libraries": machine.libraries_bytes + COMPILED_BYTES * compiles * is_host,
    }
    if not fixed["weights at work"]:
        del fixed["weights at work"]
    peaks = StepPeaks(work, choice, machine)
    phases = {
        "load": {**fixed, "buffers": LOAD_BYTES},
        "loss": {**fixed, **peaks.loss()},
        **({"decoder backward": {**fixed, **peaks.decoder_backward()}} if work.model.num_decoder_layers else {}),
        "encoder backward": {**fixed, **peaks.encoder_backward()},
        "block update": {**fixed, **peaks.block_update()},
        "last update": {**fixed, **peaks.last_update()},
        "evaluation": {**fixed, **evaluation_parts(work, choice, machine)},
        **({"samples": {**fixed, **samples_parts(work, choice, machine)}} if work.model.is_text else {}),
        "save": {**fixed, "buffers": SAVE_BYTES},
    }
    if choice.shards > 1:
        _share_out(phases, work, choice)
    passing = {phase: sum(size for name, size in parts.items() if name not in fixed) for phase, parts in phases.items()}
    most = max(passing[phase] for phase in STEP_PHASES if phase in phases)
    # the rows of a step, padded in the batches that its data comes in, and those of a pass over the model laid end to end
    rows = choice.batch_size_per_gpu
    here = work.step_shapes.together(rows, choice.micro_batches_per_pass, choice.sizes)
    ids = work.step_shapes.padded_tokens(rows) + here.source + 2 * here.target  # read by the decoder, and to be written
    for phase, parts in phases.items():
        parts["allocator slack"] = allocator_slack(peaks, phase, passing[phase], most)
        if phase in STEP_PHASES:
            parts[ROWS] = ID_BYTES * ids + ROW_BYTES * work.rows if is_host else 0
        if machine.correction != 1.0:
            parts[CORRECTION] = int((machine.correction - 1.0) * changeable(parts))
    return phases


def _fp32_beside(work: Workload, choice: ExecutionPlan) -> int:
    """Adapters and rows of tokens, and what the weights of a label head take more than if they were stored like the others."""
    label_head = sum(weight.size for weight in label_head_weights(work.model))
    t = work.trained
    # beside adapters nothing of the tables learns but rows of tokens
    adapters = t.adapters + t.embedding + max(0, t.head - label_head) if t is not None and t.adapters else 0
    return 4 * adapters + (4 - dtype_bytes(choice.storage)) * label_head


def changeable(parts: dict[str, int]) -> int:
    """The temporary memory of a phase: all but base, weights, optimizer state and rows, before any correction."""
    return sum(size for name, size in parts.items() if name not in (*FIXED, CORRECTION))


def peak_of(phases: dict[str, dict[str, int]]) -> tuple[str, int]:
    """The highest phase and its bytes."""
    totals = {phase: sum(parts.values()) for phase, parts in phases.items()}
    highest = max(totals, key=lambda phase: totals[phase])
    return highest, totals[highest]


def blocks_of(work: Workload, choice: ExecutionPlan, machine: Machine, *, is_evaluation: bool = False) -> Blocks:
    """The blocks at the largest micro-batch of a step, or of evaluation."""
    rows = choice.eval_batch_size_per_gpu if is_evaluation else choice.batch_size_per_gpu
    shapes = work.evaluation_shapes if is_evaluation else work.step_shapes
    drops = work.dropout and not is_evaluation
    sizes = NO_SIZES if is_evaluation else choice.sizes
    tokens, widest = shapes.largest_micro_batch(rows, sizes), shapes.widest_micro_batch(rows)
    c, e = work.model, dtype_bytes(choice.compute)
    kernels = choice.kernels and c.d_kv in KERNEL_WIDTHS
    residual = max(e, dtype_bytes(choice.precision.between_blocks))
    return Blocks(
        c, e, drops, tokens, widest, choice.scores, machine.fuses_attention, work.answers, kernels, work.adapted,
        machine.compiles_dropout, machine.processors, residual,
    )  # fmt: skip


class StepPeaks:
    """What the walk holds at its highest places, beside weights and optimizer state: component -> bytes."""

    def __init__(self, work: Workload, choice: ExecutionPlan, machine: Machine) -> None:
        self.c, self.work, self.choice, self.machine = work.model, work, choice, machine
        self.e, self.narrow = dtype_bytes(choice.compute), dtype_bytes(choice.precision.between_blocks)
        self.counts, self.learns = work.counts, work.learns
        self.gradient = 4 if work.trained and work.trained.adapters else self.e  # adapters are fp32
        self.blocks = blocks_of(work, choice, machine)
        # of all micro-batches that pass through a block together
        together = work.step_shapes.together(choice.batch_size_per_gpu, choice.micro_batches_per_pass, choice.sizes)
        self.source, self.target = together.source, together.target
        self.holds_all = work.hold_gradients or choice.accumulation_passes > 1
        self.waiting = 2 if machine.num_processes > 1 else 1  # blocks whose gradients are there: one on its way
        self.saved_decoder_blocks = min(choice.saved_blocks, self.c.num_decoder_layers)
        self.saved_encoder_blocks = choice.saved_blocks - self.saved_decoder_blocks
        self.last_stack = "decoder" if self.c.num_decoder_layers else "encoder"

    def graphs(self, encoder: int, decoder: int) -> int:
        """The graphs of so many saved blocks, of all micro-batches."""
        of_target, of_source = self.blocks.decoder_graph_of()
        of_source = encoder * self.blocks.encoder_graph() + decoder * of_source
        one = self.blocks.tokens
        return _scaled(of_source, self.source, one.source) + _scaled(decoder * of_target, self.target, one.target)

    def _checkpointed(self, encoder: int, decoder: int) -> int:
        if self.choice.offload_boundaries:  # of each stack those of two blocks stay: at work, and on their way
            encoder -= min(encoder, max(0, self.c.num_layers - self.saved_encoder_blocks - 2))
            decoder -= min(decoder, max(0, self.c.num_decoder_layers - self.saved_decoder_blocks - 2))
        tokens = encoder * self.source + decoder * self.target
        if decoder:  # the encoder output and its gradient are there once for each answer
            tokens += 2 * (self.work.answers - 1) * self.source
        waiting = self._recomputed_tokens(encoder, decoder)
        return self.c.d_model * (self.blocks.residual * (tokens - waiting) + self.narrow * waiting)

    def _recomputed_tokens(self, encoder: int, decoder: int) -> int:
        """Of so many checkpointed activations, those of recomputed blocks, which have the dtype between blocks."""
        norm = 1 if decoder and self.choice.saved_blocks < self.c.num_decoder_layers else 0  # after the encoder
        encoder = min(encoder, self.c.num_layers - self.saved_encoder_blocks + norm)
        decoder = min(max(0, decoder - 1), self.c.num_decoder_layers - self.saved_decoder_blocks)
        return encoder * self.source + decoder * self.target

    def _gradients(self, block: int) -> int:
        """Gradients of weights: of everything, or of head and embedding and of the blocks under way."""
        if self.holds_all:
            return self.learns["total"] * self.gradient
        return (self.learns["embedding"] + self.learns["head"] + block * self.waiting) * self.gradient

    def _new_weights(self, block: int) -> int:
        """Bytes of new weight gradients in backward of a block; later micro-batches add to those of the first (`model.layers`)."""
        return block * self.gradient if self.choice.micro_batches_per_pass == 1 and not self.holds_all else 0

    def loss(self) -> dict[str, int]:
        """After forward: all checkpointed activations, saved blocks, one chunk of logits, the gradient of the hidden states."""
        c = self.c
        table = "embedding" if c.is_text and c.tie_word_embeddings else "head"
        activations = (c.num_layers + 2, c.num_decoder_layers + 3) if c.num_decoder_layers else (c.num_layers + 3, 0)
        parts = {
            "gradients": self.learns["total" if self.choice.accumulation_passes > 1 else table] * self.gradient,
            "checkpointed activations": self._checkpointed(*activations),
            "saved blocks": self.graphs(self.saved_encoder_blocks, self.saved_decoder_blocks),
            **self._layout(),
        }
        if not c.is_text:
            return {**parts, "label head": _label_head_bytes(self.work, self.choice, self.blocks, has_gradient=True)}
        return {
            **parts,
            "logits": _logits_bytes(self.work, self.choice, self.blocks.tokens.target, has_gradient=True),
            "weights in compute dtype": _head_cast(self.work, self.choice, self.machine, self.blocks.tokens.target),
        }

    def decoder_backward(self) -> dict[str, int]:
        """Inside the last decoder block: nothing of the blocks before has been freed."""
        c, learns = self.c, self.learns["decoder"]
        graph = 0 if self.saved_decoder_blocks else self.blocks.decoder_graph()
        # micro-batches before this one have left the gradient of their encoder output
        several = self.choice.micro_batches_per_pass > 1
        return {
            "gradients": self._gradients(learns if several else 0),
            "checkpointed activations": self._checkpointed(c.num_layers + 2, c.num_decoder_layers + 1)
            + c.d_model * self.blocks.residual * (self.source - self.blocks.tokens.source),
            "saved blocks": self.graphs(self.saved_encoder_blocks, self.saved_decoder_blocks),
            "one block": graph + self._widened("decoder") + self.blocks.decoder_backward(self._new_weights(learns)),
            **self._layout(),
            "weights in compute dtype": self.cast("decoder"),
        }

    def encoder_backward(self) -> dict[str, int]:
        """Inside the last encoder block."""
        c, learns = self.c, self.learns["encoder"]
        graph = 0 if self.saved_encoder_blocks else self.blocks.encoder_graph()
        return {
            "gradients": self._gradients(learns if self.choice.micro_batches_per_pass > 1 else 0),
            "checkpointed activations": self._checkpointed(c.num_layers + 1, 0),
            "saved blocks": self.graphs(self.saved_encoder_blocks, 0),
            "one block": graph + self._widened("encoder") + self.blocks.encoder_backward(self._new_weights(learns)),
            **self._layout(),
            "weights in compute dtype": self.cast("encoder"),
        }

    def cast(self, kind: str) -> int:
        """What the matrices of a block take in the compute dtype."""
        return _block_cast(self.work, self.choice, self.machine, kind, self.blocks.tokens)

    def small_tensors(self, stack: str) -> int:
        """Of a block at work, the tensors in the heap: its graph, saved of all micro-batches, tiles of attention, its gradients and casts.

        With adapters as without: what the graph does not keep of frozen matrices comes and goes all the same.
        """
        count, is_decoder = self.choice.micro_batches_per_pass, stack == "decoder"
        saved = self.saved_decoder_blocks if is_decoder else self.saved_encoder_blocks
        largest = replace(self.blocks, adapted=NO_ADAPTERS)
        # where tensors of the largest micro-batch are mapped, those of the others may be in the heap
        typical = replace(largest, tokens=Tokens(self.source // count, self.target // count))
        # malloc serves large ones, too, from what an earlier pass has left free
        below = HEAP_BELOW if self.choice.accumulation_passes == 1 else None
        of_one, of_typical = (
            (blocks.decoder_graph if is_decoder else blocks.encoder_graph)(below) for blocks in (largest, typical)
        )
        graph = max(of_one, of_typical * (count if saved else 1))
        matrices = (math.prod(shape) * self.e for shape in self.work.block_matrices[stack])
        small = sum(size for size in matrices if size < HEAP_BELOW)
        if self.choice.storage in QUANTIZED:
            cast = self.cast(stack)
            cast = cast if cast < HEAP_BELOW else 0
        else:
            cast = small * (self.choice.storage != self.choice.compute)
        return graph + self.blocks.tile_bytes() + min(small, self.learns[stack] * self.e) + cast

    def _layout(self) -> dict[str, int]:
        one = self.blocks.tokens
        indices = self.blocks.step_indices()
        size = _scaled(indices, self.source + self.target, one.source + one.target)
        return {"layout of rows": size} if size else {}

    def _widened(self, kind: str) -> int:
        """The input of a recomputed block on one micro-batch, in the compute dtype, where it waited in a narrower one."""
        if self.narrow >= self.e or (self.saved_decoder_blocks if kind == "decoder" else self.saved_encoder_blocks):
            return 0
        tokens = self.blocks.tokens.target if kind == "decoder" else self.blocks.tokens.source
        return tokens * self.c.d_model * self.e

    def block_update(self) -> dict[str, int]:
        """The update of the last block of the last stack, in row chunks."""
        c, learns = self.c, self.learns[self.last_stack]
        matrix, most = c.d_model * max(c.d_ff, inner_width(c)), update_elements(self.choice.scores)
        widest = min(most, max(matrix, learns) if self._updates_together else matrix)
        if c.num_decoder_layers:
            activations = (c.num_layers + 3, c.num_decoder_layers)
            saved = (self.saved_encoder_blocks, max(0, self.saved_decoder_blocks - 1))
        else:
            activations, saved = (c.num_layers, 0), (max(0, self.saved_encoder_blocks - 1), 0)
        return {
            "gradients": self._gradients(learns),
            "checkpointed activations": self._checkpointed(*activations),
            "saved blocks": self.graphs(*saved),
            "one update": self._update_bytes(widest)
            + self._whole_bytes(min(matrix, learns))
            + self._kept_bytes(max(widest, matrix), is_block=True),
        }

    def last_update(self) -> dict[str, int]:
        """The update of embedding and head after the walk; where gradients are held, all of them are there."""
        table = self.c.vocab_size * self.c.d_model
        # of held gradients more are updated together than a block has
        most = self.learns["total"] if self.holds_all and self._updates_together else table
        update = self._update_bytes(min(update_elements(self.choice.scores), most)) + self._kept_bytes(table)
        return {"gradients": self._gradients(0), "one update": update}

    @property
    def _updates_together(self) -> bool:
        """Whether matrices of one shape are updated together (`engine.optimizers.base`)."""
        return self.choice.scores > 0 and self.work.rounding == "stochastic"

    def _kept_bytes(self, elements: int, is_block: bool = False) -> int:
        """Weights and their state as they were, where a gradient of a scaled loss may not count (`engine.optimizers.base`)."""
        if self.choice.compute != "float16" or self.work.hold_gradients:
            return 0
        state = OPTIMIZERS[self.work.optimizer].state_bytes(elements, elements if is_block else 0, 0, 0)
        return elements * dtype_bytes(self.choice.storage) + state

    def _whole_bytes(self, matrix: int) -> int:
        """The copy of a whole matrix, and three squares of its shorter side, where an update turns it as one.

        Where its rows lie on several processes, the squares are those of its columns, which may be the longer side.
        """
        if not OPTIMIZERS[self.work.optimizer].turns:
            return 0
        e = 2 if self.choice.compute == "bfloat16" else 4
        side = (max if self.choice.shards > 1 else min)(self.c.d_model, matrix // self.c.d_model)
        return (matrix + 3 * side**2) * e

    def _update_bytes(self, elements: int) -> int:
        facts = OPTIMIZERS[self.work.optimizer]
        if self._updates_together:
            return elements * facts.together_bytes
        if self.choice.kernels and self.work.rounding == "stochastic":
            compiled = facts.compiled_update_bytes
            return elements * (facts.update_bytes if compiled is None else compiled)
        return elements * (facts.update_bytes + (ROUNDING_BYTES if self.choice.storage != "float32" else 0))


def _scaled(of_one: int, tokens: int, of: int) -> int:
    return of_one * tokens // of if of else 0


def _head_cast(work: Workload, choice: ExecutionPlan, machine: Machine, tokens: int) -> int:
    """What the head takes in the compute dtype: where products widen it as they go, a piece and the logits of that piece."""
    if choice.storage == choice.compute:
        return 0
    c, e = work.model, dtype_bytes(choice.compute)
    rows = WIDENED_ELEMENTS // c.d_model if _widens_in_pieces(choice, machine) else c.vocab_size
    if rows >= c.vocab_size:
        return c.vocab_size * c.d_model * e
    return rows * (c.d_model + _chunk_tokens(work, choice, tokens)) * e


def _block_cast(work: Workload, choice: ExecutionPlan, machine: Machine, kind: str, tokens: Tokens) -> int:
    """What the matrices of a block take in the compute dtype: all of them, but of quantized ones those of one product."""
    e, most = dtype_bytes(choice.compute), max(tokens.source, tokens.target)
    if choice.storage == choice.compute:
        return 0
    if choice.storage not in QUANTIZED:
        return work.counts[kind] * e
    # without kernels, of int4: places of levels, and levels without their scales
    beside = 0 if choice.kernels or choice.storage == INT8 else 2 + e
    return max(_widened_at_once(shape, choice, machine, most) for shape in work.block_matrices[kind]) * (e + beside)


def _widened_at_once(shape: tuple[int, ...], choice: ExecutionPlan, machine: Machine, tokens: int) -> int:
    """Elements of a quantized matrix that a product widens together (`model.quantization`), and of what it gives for them."""
    rows, columns = shape
    if machine.widens_whole:
        return rows * columns
    of_rows = min(rows, max(LEAST_WIDENED, WIDENED_ELEMENTS // columns))
    of_columns = max(INT4_GROUP, WIDENED_ELEMENTS // rows) if choice.storage == INT4 else 0
    return max(of_rows * (columns + tokens), min(columns, of_columns) * (rows + tokens))


def _widens_in_pieces(choice: ExecutionPlan, machine: Machine) -> bool:
    return dtype_bytes(choice.storage) < dtype_bytes(choice.compute) and not machine.widens_whole


def _logits_bytes(work: Workload, choice: ExecutionPlan, tokens: int, has_gradient: bool) -> int:
    """One chunk: fp32 logits, and beside them the product or the gradient where that is of another dtype; with compiled
    kernels the product alone, which becomes the gradient."""
    chunk = _chunk_tokens(work, choice, tokens)
    narrow = 0 if choice.compute == "float32" else 2
    wide = 0 if choice.kernels and narrow else 4
    learns = has_gradient and work.learns["embedding"] + work.learns["head"] > 0
    has_product = narrow and learns and choice.storage != choice.compute
    product = 4 * work.model.d_model * work.model.vocab_size if has_product else 0
    return chunk * work.model.vocab_size * (wide + narrow) + product


def _chunk_tokens(work: Workload, choice: ExecutionPlan, tokens: int) -> int:
    tile = DEVICE_TILE if choice.scores else 1
    return min(loss_chunk_tokens(choice.loss_chunk_bytes, work.model.vocab_size, tile), max(1, tokens))


def _label_head_bytes(work: Workload, choice: ExecutionPlan, blocks: Blocks, has_gradient: bool) -> int:
    """A head over labels at work on one micro-batch: fp32 copies of its hidden states, what its layers save, and their gradients."""
    c = work.model
    tokens = blocks.tokens.target if c.num_decoder_layers else blocks.tokens.source
    wide = int(choice.compute != "float32")  # the hidden states themselves are counted as activations
    if c.head == SEQUENCE:  # what is pooled is of a few rows
        return 4 * tokens * c.d_model * (wide + 2 * has_gradient)
    layers = 2 * c.has_dense_head + work.dropout * (1 + c.has_dense_head) * has_gradient
    return 4 * tokens * (c.d_model * (wide + layers + 2 * has_gradient) + c.num_labels * (1 + 2 * has_gradient))


def evaluation_parts(work: Workload, choice: ExecutionPlan, machine: Machine) -> dict[str, int]:
    """One evaluation batch on its way through the widest block or the head."""
    c, blocks = work.model, blocks_of(work, choice, machine, is_evaluation=True)
    n, m, width = blocks.tokens.source, blocks.tokens.target, c.d_model * blocks.residual
    encoder, decoder = blocks.encoder_forward() + 2 * n * width, 0
    if c.num_decoder_layers:
        decoder = blocks.decoder_forward() + (2 * n + 2 * m) * width
    cast = max(_block_cast(work, choice, machine, kind, blocks.tokens) for kind in stacks_of(c))
    if c.is_text:
        logits = _logits_bytes(work, choice, m, has_gradient=False)
        cast = max(cast, _head_cast(work, choice, machine, m))
    else:
        logits = _label_head_bytes(work, choice, blocks, has_gradient=False)
    working = max(encoder, decoder, logits + (2 * n + 2 * m) * width) + blocks.step_indices()
    return {"one block": working, "weights in compute dtype": cast}


def samples_parts(work: Workload, choice: ExecutionPlan, machine: Machine) -> dict[str, int]:
    """A few answers at the end: keys and values of what is read and written, and one row of logits each."""
    c, e = work.model, dtype_bytes(choice.compute)
    rows, longest = work.sample_rows, work.evaluation_shapes.longest_row.source
    cache = c.num_decoder_layers * 2 * inner_width(c) * e * rows * (longest + SAMPLE_TOKENS)
    head = _head_cast(work, choice, machine, rows)
    block = 0 if _widens_in_pieces(choice, machine) else max(work.counts["encoder"], work.counts["decoder"]) * e
    return {
        "keys and values": cache,
        "one block": rows * longest * e * (5 * c.d_model + 3 * c.d_ff) + rows * c.vocab_size * 8,
        "weights in compute dtype": max(head, block) if choice.storage != choice.compute else 0,
    }


def offloaded_bytes(work: Workload, choice: ExecutionPlan, machine: Machine) -> int:
    """Host memory of the checkpointed activations that wait there, in slabs; 0 where none do."""
    if not choice.offload_boundaries:
        return 0
    c, tokens = work.model, blocks_of(work, choice, machine).tokens
    width = c.d_model * dtype_bytes(choice.precision.between_blocks)
    saved_decoder_blocks = min(choice.saved_blocks, c.num_decoder_layers)
    encoder = c.num_layers + 1 - (choice.saved_blocks - saved_decoder_blocks)  # the norm after the encoder among them
    decoder = c.num_decoder_layers - saved_decoder_blocks
    sizes = ((encoder, tokens.source * width), (decoder, tokens.target * width))
    total = 0
    for count, size in sizes:  # pinned in slabs, a larger tensor in one of its own, rounded up to a power of two
        slab = SLAB_BYTES if size <= SLAB_BYTES else 1 << (size - 1).bit_length()
        total += math.ceil(choice.micro_batches_per_pass * count / (slab // max(1, size))) * slab
    return total


def allocator_slack(peaks: StepPeaks, phase: str, passing: int, most: int) -> int:
    """What malloc keeps in `phase`, in which `passing` bytes come and go; `most` in any phase of a step."""
    malloc = peaks.choice.malloc
    if phase == "load":
        return 0
    if malloc == "small":
        return int(SMALL_SHARE * passing)
    share, least = HEAP_EXCESS[malloc]
    if malloc == "untrimmed":
        highest = passing if phase in CLEANED_BEFORE else most
        return highest + max(int(share * highest), min(highest, least)) - passing
    if phase == "loss" and peaks.choice.accumulation_passes == 1:  # trimmed just before
        pieces = 0
    elif phase in ("encoder backward", "last update"):
        pieces = peaks.small_tensors("encoder") + peaks.block_update()["one update"]
        is_first = phase == "encoder backward" and not peaks.c.num_decoder_layers and peaks.waiting == 1
        if is_first and peaks.saved_encoder_blocks and not peaks.work.adapted.targets:
            # what comes free after the trim before the loss takes the place of the last block's graph; that of adapters is too small
            pieces = max(0, pieces - peaks.graphs(1, 0))
    else:
        pieces = peaks.small_tensors(peaks.last_stack)
    return least + int(share * passing + PIECES_SHARE * pieces)


def _share_out(phases: dict[str, dict[str, int]], work: Workload, choice: ExecutionPlan) -> None:
    """Turn the parts of each phase into those of one of the processes that share weights and state, in place.

    A process holds 1/p of every matrix and of its state, and the whole of one block while it runs. The gradient of a block is whole
    until it is summed, while the rows of the block before wait for their update. The head is gathered for the loss, with a whole
    gradient beside it; between that and the end only its rows are held.
    """
    counts, shards = work.counts, choice.shards
    storage, compute = dtype_bytes(choice.storage), dtype_bytes(choice.compute)
    table, head, block = counts["embedding"], counts["head"], max(counts["encoder"], counts["decoder"])
    # where its rows do not part evenly they are copied to be summed, with rows of padding
    padded = table * compute if work.model.vocab_size % shards else 0
    # no gathered weight outlives its block, but a run with 12 saved blocks took that much more: the heap between their graphs
    held = choice.saved_blocks * block * storage
    ahead = 2 if choice.scores else 1  # blocks whose weights are gathered at a time: on a GPU the next one too
    gathered = {
        "loss": table * storage + held, "decoder backward": ahead * block * storage + held,
        "encoder backward": ahead * block * storage + held, "block update": held,
        "evaluation": max(table, block) * storage, "save": table * STATE_BYTES,
    }  # fmt: skip
    for phase, parts in phases.items():
        parts |= {name: parts[name] // shards for name in ("weights", "optimizer state")}
        if phase in gathered:
            parts["gathered weights"] = gathered[phase]
        if phase == "loss":
            parts["gradients"] += padded
        elif "gradients" in parts:
            whole = min(max(0, parts["gradients"] // compute - table - head), block)
            waiting = 0 if phase == "last update" else block // shards  # of the block before: its rows alone
            parts["gradients"] = ((table + head) // shards + whole + waiting) * compute
    # the tokens' gradients are added up in a whole table, twice; beside it its rows of the sum, those of the first time, and the head's
    first = "decoder backward" if work.model.num_decoder_layers else "encoder backward"
    rest = {k: v for k, v in phases[first].items() if k not in ("one block", "saved blocks")}
    rest["gradients"] = (table + (2 * table + head) // shards) * compute + padded
    phases["embedded tokens"] = rest
