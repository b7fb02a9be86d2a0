"""The time of a step, and of what is left of a run.

A step takes the time of its products, at the rate of the machine's class, of the values between them, of passes over
the weights, and a fixed time for each block; a forward alone takes its share of that. Nominal rates rank execution
plans, so that the same one comes out on a busy machine; measured ones tell the user the time, until the first steps
tell it better. What differs between classes of processors is in `PACES`: a calibration by steps that were timed
changes these numbers and nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from devices.processor import AMX_BF16, AVX2, AVX512_BF16
from devices.sizes import ANSWERED_TOGETHER, SAMPLE_TOKENS
from memory.estimate.precision import QUANTIZED, dtype_bytes
from memory.estimate.shapes import Shapes
from memory.estimate.weight_offload import transfer_seconds
from memory.estimate.workload import ExecutionPlan, Machine, Workload, state_bytes
from model.shapes import inner_width, is_gated, weight_counts
from settings.declared import Config, T5ModelConfig
from settings.fields import AUTO
from settings.optimizers import OPTIMIZERS

MALLOC_SPEED = {"small": 0.73, "fast": 1.0, "untrimmed": 1.15}  # "small" has the system zero every tensor again.
WIDE = 512  # From this d_model on, fewer tokens fill a product.
# Passes over weights of four bytes: over the trained ones in an update, and in each further accumulation pass, which
# adds to all gradients; over all where they are widened for the products, quantized ones a piece at a time in the
# cache.
UPDATE_PASSES = 6
ACCUMULATING_PASSES = 2
WIDENING_PASSES = 12
QUANTIZED_PASSES = 5
COPY_RATE = 10e9  # Bytes a second between device and host.
WIRE_RATE = 10e9  # Bytes a second of one process: what two processes of a machine reach.
SAVE_RATE = 3e8  # Bytes a second of a checkpoint.
BUILD_RATE = 1e8  # Weights a second, made or loaded at the start.
RENEWED_STEPS = 20  # After so many steps the time is told again.
UNTIMED_STEPS = 3  # The first of them warm caches up.
RENEWED_SPREAD = 0.1  # At least: what steps scatter may be more.


@dataclass(frozen=True)
class Pace:
    """How a class of processors gets through a run. The defaults were fitted to AVX2.

    Args:
        efficiency: share of the rate of products that a step reaches in large micro-batches.
        half_tokens: of a micro-batch at which it reaches half of that, at a d_model of up to `WIDE`.
        memory_rate: bytes a second of passes over weights.
        block_seconds: of a block and a micro-batch, forward or back, whatever its size. update_seconds: of a block's
            update likewise.
        value_flops: fp32 products in whose time a forward gets through one value between its products (norms, casts,
            softmax, dropout, loss), so that it grows with the threads; 0: they are a part of `efficiency`.
        spread: share by which a run may take longer, or less, than predicted from measured rates; from nominal ones
            twice that.
    """

    efficiency: float = 0.5
    half_tokens: float = 64
    memory_rate: float = 8e9
    block_seconds: float = 0.0
    update_seconds: float = 0.0
    value_flops: float = 0.0
    spread: float = 0.5  # No step was measured.


FITTED_BF16 = {
    "efficiency": 0.86,
    "block_seconds": 1.06e-3,
    "update_seconds": 3e-3,
    "value_flops": 181,
    "memory_rate": 2.08e10,
}
PACES = {
    AVX2.name: Pace(spread=0.25),
    AVX512_BF16.name: Pace(**FITTED_BF16, spread=0.25),
    AMX_BF16.name: Pace(**FITTED_BF16),  # Nothing was fitted yet but that a micro-batch has its own cost.
    # An H200's host took 33 to 45 us a kernel, of which a block has some 40 each way and 110 in its update
    # (`benchmarks.checks.launches`).
    "cuda": Pace(half_tokens=1024, memory_rate=5e11, block_seconds=1.5e-3, update_seconds=5e-3),
    "mps": Pace(memory_rate=5e10, block_seconds=3e-4, update_seconds=1e-3),
}


@dataclass(frozen=True)
class Amount:
    """What some rows come to: their number, tokens of both sides, and sums over rows of squares and products of
    lengths.
    """

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


@lru_cache(maxsize=2)  # Plans of one run are compared by the thousand.
def mean_amount(shapes: Shapes) -> Amount:
    """The mean of the steps that were looked at. Memory: none that grows with them."""
    source = shapes.sources
    target = shapes.targets
    pairs = ((source, source), (target, target), (source, target))
    products = (np.einsum("sr,sr->", *pair, dtype=np.int64) for pair in pairs)
    sums = (np.count_nonzero(source), source.sum(), target.sum(), *products)
    return Amount(*(float(each) / len(source) for each in sums))


def flops_of(model: T5ModelConfig, amount: Amount) -> tuple[float, float]:
    """FLOP of one forward over the blocks, and of the head."""
    counts = weight_counts(model)
    inner = inner_width(model)
    encoder = model.num_layers * (2 * counts["encoder"] * amount.source + 4 * inner * amount.source_squared)
    # Keys and values of cross-attention are made of the source.
    cross = 2 * (2 * model.d_model * inner) * (amount.source - amount.target)
    scores = 2 * inner * amount.target_squared + 4 * inner * amount.crossed
    decoder = model.num_decoder_layers * (2 * counts["decoder"] * amount.target + cross + scores)
    # A head over labels is next to nothing.
    head = 2 * model.d_model * model.output_vocabulary * amount.target
    return float(encoder + decoder), float(head)


def recomputed_flops(model: T5ModelConfig, amount: Amount) -> float:
    """FLOP of running all blocks once more for backward: a forward without the product after feed-forward."""
    blocks, _ = flops_of(model, amount)
    tokens = model.num_layers * amount.source + model.num_decoder_layers * amount.target
    return blocks - 2 * model.d_ff * model.d_model * tokens


def predict_seconds(work: Workload, choice: ExecutionPlan, machine: Machine, pace: Pace | None = None) -> float:
    """Predict how long the run's steps take in the mean, at the machine's rates.

    Args:
        machine: as it is, to compare execution plans; `as_measured`, to tell the time.
        pace: constants of the class, as a calibration tries them; None: those of the machine's.
    """
    pace = pace or _pace_of(machine)
    model = work.model
    amount = mean_amount(work.step_shapes)
    num_blocks = model.num_layers + model.num_decoder_layers
    passes = _passes(work, choice)
    recomputed = 1 - choice.saved_blocks / num_blocks
    # Products, the more efficient the more tokens a micro-batch has:
    flops = (passes - recomputed) * sum(flops_of(model, amount)) + recomputed * recomputed_flops(model, amount)
    flops += OPTIMIZERS[work.optimizer].turns * work.learning.turn_flops
    tokens = max(1.0, choice.batch_size_per_gpu * (amount.source + amount.target) / max(1.0, amount.rows))
    half_tokens = pace.half_tokens * min(1.0, WIDE / model.d_model) ** 2
    efficiency = MALLOC_SPEED[choice.malloc] * pace.efficiency * tokens / (tokens + half_tokens)
    busy = flops / (machine.rate(choice.compute) * efficiency)
    busy += passes * _activation_values(model, amount) * pace.value_flops / machine.rate("float32")
    # What takes its time whatever the sizes:
    busy += num_blocks * choice.gradient_accumulation_steps * (2 + recomputed) * pace.block_seconds
    busy += num_blocks * pace.update_seconds
    # Passes over weights:
    trained = work.learns["total"]
    weights = (UPDATE_PASSES + ACCUMULATING_PASSES * (choice.accumulation_passes - 1)) * trained
    if choice.storage != choice.compute:
        widening = QUANTIZED_PASSES if choice.storage in QUANTIZED else WIDENING_PASSES
        weights += widening * choice.accumulation_passes * work.counts["total"]
    busy += 4 * weights / pace.memory_rate
    # Offloaded weights are waited for, forward and back, each beside what it computes.
    bringing, taking = transfer_seconds(work, choice, machine, COPY_RATE)
    bringing *= choice.accumulation_passes
    forward = busy / passes
    waiting = max(0.0, bringing - forward) + max(0.0, bringing + taking - (busy - forward))
    # An all-reduce sends each gradient twice.
    sent = 2 * dtype_bytes(choice.compute) * work.counts["total"] * (1 - 1 / machine.num_processes)
    return busy + waiting + sent / WIRE_RATE


def _passes(work: Workload, choice: ExecutionPlan) -> float:
    """Times a step takes what a forward does: forward, back to what comes before, gradients of what learns,
    recomputation.
    """
    num_blocks = work.model.num_layers + work.model.num_decoder_layers
    return 2 + min(1.0, work.learns["total"] / work.counts["total"]) + 1 - choice.saved_blocks / num_blocks


def _activation_values(model: T5ModelConfig, amount: Amount) -> float:
    """Values that one forward makes between its products: a token's own, scores of attention, and logits."""
    inner = inner_width(model)
    wide = model.d_ff * (2 if is_gated(model) else 1)
    encoder = amount.source * (4 * model.d_model + 4 * inner + wide) + model.num_heads * amount.source_squared
    decoder = amount.target * (6 * model.d_model + 6 * inner + wide) + 2 * inner * amount.source
    decoder += model.num_heads * (amount.target_squared + amount.crossed)
    logits = amount.target * model.output_vocabulary
    return model.num_layers * encoder + model.num_decoder_layers * decoder + logits


def _pace_of(machine: Machine) -> Pace:
    return PACES.get(machine.speed_class, Pace())


@dataclass(frozen=True)
class RemainingWork:
    """What is left of a run, on one process.

    Args:
        steps: to go. saves: how many.
        evaluated_rows: of all evaluations together.
        reference_steps: whose rows a reference model sees, too, before the run or in its steps.
        answer_tokens: of the longest answers of all batches that are written, one batch after another.
        beams: of all rows of such a batch.
    """

    steps: int
    saves: int
    evaluated_rows: int
    reference_steps: int = 0
    answer_tokens: int = 0
    beams: int = 1


@dataclass(frozen=True)
class Duration:
    """Seconds of what is left, and between which they lie."""

    seconds: float
    low: float
    high: float

    @classmethod
    def within(cls, seconds: float, spread: float) -> Duration:
        """The range that a spread makes: as many times longer as shorter."""
        return cls(seconds, seconds / (1 + spread), seconds * (1 + spread))


def remaining_work(
    config: Config, first_step: int, held_out: int, answer_tokens: int, num_processes: int = 1
) -> RemainingWork:
    """Count what is left behind `first_step` steps.

    An evaluation comes before the first step of a run, at its turns and at the end, where one of the mean of the last
    checkpoints may follow; each that is the best is saved, and while a model learns most are.

    Args:
        config: its steps resolved. held_out: rows of the validation data. answer_tokens: of the longest answer.
    """
    train = config.train
    last = int(train.max_steps)
    samples = SAMPLE_TOKENS if train.sample_rows and config.task.writes_text else 0
    if first_step >= last:
        return RemainingWork(0, 0, 0, answer_tokens=samples)

    def turns(every: int) -> set[int]:
        return {*range(first_step + every - first_step % every, last + 1, every), last}

    saves = turns(int(train.save_steps))
    evaluations = 0
    if min(train.eval_rows, held_out):
        evaluated = turns(int(train.eval_steps))
        saves |= evaluated
        evaluations = len(evaluated) + (first_step == 0) + (train.average_checkpoints > 1)
    scored = 0
    if config.metrics.eval_generate_rows != AUTO:
        scored = math.ceil(min(int(config.metrics.eval_generate_rows), held_out) / num_processes)
    return RemainingWork(
        last - first_step,
        len(saves),
        evaluations * math.ceil(min(train.eval_rows, held_out) / num_processes),
        reference_steps=last - first_step if config.task.has_reference(config.preference) else 0,
        answer_tokens=samples + evaluations * math.ceil(scored / ANSWERED_TOGETHER) * answer_tokens,
        beams=config.generate.num_beams * min(scored, ANSWERED_TOGETHER) if config.answer.num_answers > 1 else 1,
    )


def predict_times(work: Workload, choice: ExecutionPlan, machine: Machine, schedule: RemainingWork) -> Duration:
    """Predict how long what is left of a run takes, with measured speeds where there are any."""
    pace = _pace_of(machine)
    spread = pace.spread if machine.measured else 2 * pace.spread
    machine = machine.as_measured()
    step = predict_seconds(work, choice, machine)
    forward = step / _passes(work, choice)
    # A token of each beam reads the decoder's weights and the head once for all of them.
    weights = work.model.num_decoder_layers * work.counts["decoder"] + work.counts["embedding"]
    products = 2 * schedule.beams * weights / machine.rate(choice.compute)
    token = 4 * weights / pace.memory_rate + products + work.model.num_decoder_layers * pace.block_seconds
    bringing, _ = transfer_seconds(work, choice, machine, COPY_RATE)
    # Adapters are saved alone, in fp32.
    saved_bytes = 4 * work.learning.adapters or work.counts["total"] * dtype_bytes(choice.storage)
    seconds = (
        schedule.steps * step
        + (schedule.evaluated_rows / work.rows + schedule.reference_steps) * forward
        + schedule.answer_tokens * max(token, bringing)
        + schedule.saves * (saved_bytes + state_bytes(work)) / SAVE_RATE
        + work.counts["total"] / BUILD_RATE
    )
    return Duration.within(seconds, spread)


class Renewal:
    """Predicts the time that is left anew, once, from what the first steps took.

    Args:
        step_seconds, total_seconds: as they were predicted, of a step and of all that was left; None: nothing was.
        steps: that were left.
    """

    def __init__(self, step_seconds: float, total_seconds: float | None, steps: int) -> None:
        self._predicted = step_seconds
        self._around = max(0.0, (total_seconds or 0.0) - steps * step_seconds)
        self._steps = steps
        self._seconds = list[float]()

    def after_step(self, seconds: float) -> Duration | None:
        """What is left after a step that took so long; None at all steps but the one that renews."""
        if len(self._seconds) >= RENEWED_STEPS or self._steps <= RENEWED_STEPS:
            return None
        self._seconds.append(seconds)
        if len(self._seconds) < RENEWED_STEPS:
            return None
        timed = np.array(self._seconds[UNTIMED_STEPS:])
        mean = float(timed.mean())
        scatter = float(timed.std()) / math.sqrt(len(timed)) / mean if mean else 0.0
        # What lies around the steps is spread over them, and as much slower or faster as they are.
        around = self._around * (mean / self._predicted if self._predicted else 1.0)
        remaining = (self._steps - RENEWED_STEPS) * (mean + around / self._steps)
        return Duration.within(remaining, max(RENEWED_SPREAD, 2 * scatter))
