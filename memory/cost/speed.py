"""How long does one way to run a step take? Products at the machine's rate, updates, and the wire between processes.

What differs between classes of processors is in one record of each, `PACES`; a calibration changes these numbers and
nothing else. With nominal rates the seconds rank ways to run (`predict_seconds`), so that they come out the same on a busy
machine; with measured ones and the rows' own lengths they tell the time (`typical_seconds`, `evaluation_seconds`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from config import T5ModelConfig
from devices.processor import AMX_BF16, ARM_BF16, ARM_PLAIN, AVX2, AVX512_BF16
from memory.cost.homes import moving_seconds
from memory.cost.precision import QUANTIZED, dtype_bytes
from memory.cost.shapes import Shapes
from memory.cost.sharing import communication_seconds
from memory.cost.step_peaks import offloaded_bytes
from memory.cost.work import Choice, Machine, Work
from model.shapes import inner_width, is_gated, weight_counts
from optimizers import OPTIMIZERS


@dataclass(frozen=True)
class Pace:
    """How a class of processors gets through a run.

    Args:
        efficiency: share of the rate of products that a step reaches in large micro-batches.
        half_tokens: of a micro-batch at which it reaches half of that; fewer below a d_model of `wide`; 0: always so many.
        small_malloc: speed with malloc "small", which returns every freed tensor to the system, which zeroes it again;
            untrimmed_malloc: the same where none is returned between steps.
        update_passes: over all weights that learn, four bytes each, of an update. walk_passes: of each further walk, which
            reads and adds to all gradients as part of the products. rounding_passes, cast_passes: where storage and products
            differ, of rounding what learns, and of the casts of a walk; widening_passes: of a walk over quantized weights,
            of which a piece at a time is widened and stays in cache.
        memory_rate: bytes a second of those passes. copy_rate: between device and host, hidden behind the computation.
        block_seconds: of a block and a micro-batch, forward or back, whatever its size. step_seconds: of a step likewise.
        value_flops: fp32 products in whose time a forward gets through one value between its products (norms, casts, softmax,
            dropout, loss), so that it grows with the threads; 0: they are a part of `efficiency`.
        evaluation: share of `efficiency` that forward alone reaches.
        save_rate: bytes a second of a checkpoint. build_rate: weights a second, made or loaded at the start.
        spread, nominal_spread: share by which a run may take longer, or less, than told: with measured rates, without.
    """

    efficiency: float = 0.5
    half_tokens: float = 64
    wide: float = 512
    small_malloc: float = 0.73
    untrimmed_malloc: float = 1.15
    update_passes: float = 6
    walk_passes: float = 2
    rounding_passes: float = 3
    cast_passes: float = 12
    widening_passes: float = 5
    memory_rate: float = 8e9
    copy_rate: float = 10e9
    block_seconds: float = 0.0
    step_seconds: float = 0.0
    value_flops: float = 0.0
    evaluation: float = 1.0
    save_rate: float = 3e8
    build_rate: float = 1e8
    spread: float = 0.25
    nominal_spread: float = 0.5


GUESSED = {"spread": 0.5, "nominal_spread": 1.0}  # where no step was measured
# class of what computes -> its record; AVX2's and AVX512_BF16's were fitted to measured steps, the others start from the first
FITTED_BF16 = {
    "efficiency": 0.86,
    "block_seconds": 1.06e-3,
    "step_seconds": 0.019,
    "value_flops": 181,
    "memory_rate": 2.08e10,
}
PACES = {
    AVX2.name: Pace(),
    AVX512_BF16.name: Pace(**FITTED_BF16),
    AMX_BF16.name: Pace(**GUESSED),
    ARM_BF16.name: Pace(**GUESSED),
    ARM_PLAIN.name: Pace(**GUESSED),
    # 60 kernels a block and way, and 2,000 of an update, at 5 us each; counted by `benchmarks.checks.launches`, not timed
    "cuda": Pace(half_tokens=1024, wide=0, memory_rate=5e11, block_seconds=3e-4, step_seconds=1e-2, **GUESSED),
    "mps": Pace(memory_rate=5e10, block_seconds=3e-4, step_seconds=1e-2, **GUESSED),
}


def pace_of(speed_class: str) -> Pace:
    """The record of a class; of one that has none, a guess."""
    return PACES.get(speed_class) or Pace(**GUESSED)


@dataclass(frozen=True)
class Amount:
    """What some rows come to: their number, tokens of both sides, and sums over rows of squares and products of lengths."""

    rows: float
    source: float
    target: float
    source_squared: float
    target_squared: float
    crossed: float

    @classmethod
    def of_rows(cls, rows: float, source: float, target: float) -> Amount:
        """Rows of one length."""
        return cls(rows, rows * source, rows * target, rows * source**2, rows * target**2, rows * source * target)

    @classmethod
    def mean_of(cls, shapes: Shapes) -> Amount:
        """The mean of the steps that were looked at. Memory: none that grows with them."""
        source, target, steps = shapes.sources, shapes.targets, len(shapes.sources)
        pairs = ((source, source), (target, target), (source, target))
        sums = (
            np.count_nonzero(source),
            source.sum(),
            target.sum(),
            *(np.einsum("sr,sr->", *pair, dtype=np.int64) for pair in pairs),
        )
        return cls(*(float(one) / steps for one in sums))


def flops_of(c: T5ModelConfig, amount: Amount) -> tuple[float, float]:
    """FLOP of one forward over the blocks, and of the head."""
    counts, inner = weight_counts(c), inner_width(c)
    encoder = c.num_layers * (2 * counts["encoder"] * amount.source + 4 * inner * amount.source_squared)
    cross = 2 * (2 * c.d_model * inner) * (amount.source - amount.target)  # keys and values are made of the source
    decoder = c.num_decoder_layers * (
        2 * counts["decoder"] * amount.target + cross + 2 * inner * amount.target_squared + 4 * inner * amount.crossed
    )
    return float(encoder + decoder), float(2 * counts["embedding"] * amount.target)


def predict_seconds(work: Work, choice: Choice, machine: Machine, pace: Pace | None = None) -> float:
    """Predict how long a step takes whose rows are all the longest: what ways to run are compared by.

    Args:
        pace: constants of the class; None: those of the machine's.
    """
    step = work.step_shapes.step
    tokens = choice.batch_size_per_gpu * (step.source + step.target) / work.rows
    amount = Amount.of_rows(work.rows, work.source_tokens, work.target_tokens)
    return _seconds(work, choice, machine, pace or pace_of(machine.speed_class), amount, tokens)


def typical_seconds(work: Work, choice: Choice, machine: Machine, pace: Pace | None = None) -> float:
    """Predict how long the run's steps take in the mean, their rows as long as they are. Args as of `predict_seconds`."""
    amount = Amount.mean_of(work.step_shapes)
    tokens = choice.batch_size_per_gpu * (amount.source + amount.target) / max(1.0, amount.rows)
    return _seconds(work, choice, machine, pace or pace_of(machine.speed_class), amount, tokens)


def evaluation_seconds(work: Work, choice: Choice, machine: Machine, rows: int, pace: Pace | None = None) -> float:
    """Predict how long one evaluation takes.

    Args:
        rows: that this process evaluates.
    """
    pace, seen = pace or pace_of(machine.speed_class), Amount.mean_of(work.evaluation_shapes)
    share = rows / max(1.0, seen.rows)
    size = min(choice.eval_batch_size_per_gpu, max(1, rows))
    tokens = size * (seen.source + seen.target) / max(1.0, seen.rows)
    rate = machine.rate(choice.compute) * pace.evaluation * _efficiency(pace, choice, work.model.d_model, tokens)
    blocks = work.model.num_layers + work.model.num_decoder_layers
    bringing, _ = moving_seconds(work, choice, machine, pace.copy_rate)
    computing = share * sum(flops_of(work.model, seen)) / rate + blocks * rows / size * pace.block_seconds
    return max(computing, rows / size * bringing)


def writing_seconds(work: Work, choice: Choice, machine: Machine, tokens: int, pace: Pace | None = None) -> float:
    """Predict how long one batch of answers of so many tokens takes: each reads the decoder's weights and the head once."""
    pace, counts = pace or pace_of(machine.speed_class), work.counts
    blocks = work.model.num_decoder_layers
    weights = blocks * counts["decoder"] + counts["embedding"]
    reading, computing = 4 * weights / pace.memory_rate, 2 * weights / machine.rate(choice.compute)
    bringing, _ = moving_seconds(work, choice, machine, pace.copy_rate)
    return tokens * max(reading + computing + blocks * pace.block_seconds, bringing)


def _seconds(work: Work, choice: Choice, machine: Machine, pace: Pace, amount: Amount, tokens: float) -> float:
    """Of a step over `amount`, in micro-batches of so many tokens: products, passes over the weights, and the wire."""
    blocks, head = flops_of(work.model, amount)
    total_blocks = work.model.num_layers + work.model.num_decoder_layers
    recompute = 1.0 - choice.saved_blocks / total_blocks
    efficiency = _efficiency(pace, choice, work.model.d_model, tokens)
    count = work.counts["total"]
    exchange = communication_seconds(
        count, machine.num_processes, choice.shards, dtype_bytes(choice.storage), dtype_bytes(choice.compute)
    )
    again = recompute * recomputed_flops(work.model, amount)
    # forward, and back to what comes before; gradients of weights are formed for those alone that learn
    passes = 2.0 + min(1.0, work.learns["total"] / count)
    computing = (passes * (blocks + head) + again) / (machine.rate(choice.compute) * efficiency)
    computing += (
        OPTIMIZERS[work.optimizer].turns * work.learning.turn_flops / (machine.rate(choice.compute) * efficiency)
    )
    computing += total_blocks * choice.gradient_accumulation_steps * (2 + recompute) * pace.block_seconds
    values = (passes + recompute) * _activation_values(work.model, amount)
    computing += values * pace.value_flops / machine.rate("float32")
    copying = 2 * offloaded_bytes(work, choice, machine) / pace.copy_rate
    passing = 4 * _passed(work, pace, choice) / choice.shards / pace.memory_rate + pace.step_seconds
    busy = max(computing + 0.05 * copying, copying) + passing
    # weights that rest elsewhere are waited for, forward and back, each beside what it computes
    bringing, taking = moving_seconds(work, choice, machine, pace.copy_rate)
    bringing, forward = bringing * choice.accumulation_passes, busy / (passes + recompute)
    waiting = max(0.0, bringing - forward) + max(0.0, bringing + taking - (busy - forward))
    return busy + waiting + exchange


def _efficiency(pace: Pace, choice: Choice, d_model: int, tokens: float) -> float:
    narrow = min(1.0, pace.wide / d_model) ** 2 if pace.wide else 1.0  # wide products need fewer tokens
    malloc = {"small": pace.small_malloc, "fast": 1.0, "untrimmed": pace.untrimmed_malloc}[choice.malloc]
    return malloc * pace.efficiency * tokens / (tokens + pace.half_tokens * narrow)


def _passed(work: Work, pace: Pace, choice: Choice) -> float:
    updating = pace.update_passes + pace.walk_passes * (choice.accumulation_passes - 1)
    if choice.storage == choice.compute:
        return updating * work.learns["total"]
    casting = pace.widening_passes if choice.storage in QUANTIZED else pace.cast_passes
    learning, all_of_them = work.learns["total"], work.counts["total"] * choice.accumulation_passes
    return (updating + pace.rounding_passes) * learning + casting * all_of_them


def _activation_values(c: T5ModelConfig, amount: Amount) -> float:
    """Values that one forward makes between its products: a token's own, scores of attention, and logits."""
    inner, wide = inner_width(c), c.d_ff * (2 if is_gated(c) else 1)
    encoder = c.num_layers * (amount.source * (4 * c.d_model + 4 * inner + wide) + c.num_heads * amount.source_squared)
    own = amount.target * (6 * c.d_model + 6 * inner + wide) + 2 * inner * amount.source
    decoder = c.num_decoder_layers * (own + c.num_heads * (amount.target_squared + amount.crossed))
    return encoder + decoder + amount.target * c.vocab_size


def recomputed_flops(c: T5ModelConfig, amount: Amount) -> float:
    """FLOP of running all blocks once more for backward: a forward without the product after feed-forward."""
    blocks, _ = flops_of(c, amount)
    tokens = c.num_layers * amount.source + c.num_decoder_layers * amount.target
    return blocks - 2 * c.d_ff * c.d_model * tokens
