"""The time of a step and of what is left of a run: products at the machine's rate, updates, the wire between processes.

What differs between classes of processors is in one record of each, `PACES`; a calibration changes these numbers and
nothing else. With nominal rates the seconds rank execution plans (`predict_seconds`), so that they come out the same on a
busy machine; with measured ones and the rows' own lengths they tell the time (`typical_seconds`, `predict_times`). After the
first steps the time is told again, from what they took."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from devices.processor import AMX_BF16, ARM_BF16, ARM_PLAIN, AVX2, AVX512_BF16
from limits import ANSWERED_TOGETHER, SAMPLE_TOKENS
from memory.estimate.precision import QUANTIZED, dtype_bytes
from memory.estimate.shapes import Shapes
from memory.estimate.weight_offload import moving_seconds
from memory.estimate.workload import ExecutionPlan, Machine, Workload, state_bytes
from model.shapes import inner_width, is_gated, weight_counts
from optimizers import OPTIMIZERS
from settings.consistency import PREFERENCES
from settings.declared import Config, T5ModelConfig
from settings.fields import AUTO

WIRE_BYTES_PER_SECOND = 10e9  # of one process, where nothing is measured: what two processes of a machine reach
WITHOUT_REFERENCE = "orpo"  # the preference loss that compares with no other model
RENEWED_STEPS = 20  # after so many steps the time is told again
UNTIMED_STEPS = 3  # the first of them warm caches up
RENEWED_SPREAD = 0.1  # at least: what steps scatter may be more


@dataclass(frozen=True)
class Pace:
    """How a class of processors gets through a run.

    Args:
        efficiency: share of the rate of products that a step reaches in large micro-batches.
        half_tokens: of a micro-batch at which it reaches half of that; fewer below a d_model of `wide`; 0: always so many.
        small_malloc: speed with malloc "small", which returns every freed tensor to the system, which zeroes it again;
            untrimmed_malloc: the same where none is returned between steps.
        update_passes: of an update, over all trained weights at four bytes each.
        accumulating_passes: of each further accumulation pass, which reads and adds to all gradients within the products.
        rounding_passes, cast_passes: where storage and products differ, of rounding what is trained, and of the casts.
        widening_passes: over quantized weights, of which a piece at a time is widened and stays in cache.
        memory_rate: bytes a second of those passes. copy_rate: between device and host.
        block_seconds: of a block and a micro-batch, forward or back, whatever its size. update_seconds: of a block's update
            likewise. step_seconds: of a step.
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
    accumulating_passes: float = 2
    rounding_passes: float = 3
    cast_passes: float = 12
    widening_passes: float = 5
    memory_rate: float = 8e9
    copy_rate: float = 10e9
    block_seconds: float = 0.0
    update_seconds: float = 0.0
    step_seconds: float = 0.0
    value_flops: float = 0.0
    evaluation: float = 1.0
    save_rate: float = 3e8
    build_rate: float = 1e8
    spread: float = 0.25
    nominal_spread: float = 0.5


GUESSED = {"spread": 0.5, "nominal_spread": 1.0}  # where no step was measured
# class of what computes -> its record; AVX2's and AVX512_BF16's were fitted to measured steps, the others start from the first
FITTED_BF16 = Pace(efficiency=0.86, block_seconds=1.06e-3, step_seconds=0.019, value_flops=181, memory_rate=2.08e10)
PACES = {
    AVX2.name: Pace(),
    AVX512_BF16.name: FITTED_BF16,
    AMX_BF16.name: replace(FITTED_BF16, **GUESSED),  # nothing fitted yet but that a micro-batch has its own cost
    ARM_BF16.name: Pace(**GUESSED),
    ARM_PLAIN.name: Pace(**GUESSED),
    # an H200's host took 33 to 45 us a kernel, of which a block has some 40 a way and 110 in its update (`benchmarks.checks.launches`)
    "cuda": Pace(
        half_tokens=1024,
        wide=0,
        memory_rate=5e11,
        block_seconds=1.5e-3,
        update_seconds=4.2e-3,
        step_seconds=2e-2,
        **GUESSED,
    ),
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
        products = (np.einsum("sr,sr->", *pair, dtype=np.int64) for pair in pairs)
        sums = (np.count_nonzero(source), source.sum(), target.sum(), *products)
        return cls(*(float(one) / steps for one in sums))


def flops_of(c: T5ModelConfig, amount: Amount) -> tuple[float, float]:
    """FLOP of one forward over the blocks, and of the head."""
    counts, inner = weight_counts(c), inner_width(c)
    encoder = c.num_layers * (2 * counts["encoder"] * amount.source + 4 * inner * amount.source_squared)
    cross = 2 * (2 * c.d_model * inner) * (amount.source - amount.target)  # keys and values are made of the source
    decoder = c.num_decoder_layers * (
        2 * counts["decoder"] * amount.target + cross + 2 * inner * amount.target_squared + 4 * inner * amount.crossed
    )
    head = 2 * counts["embedding"] * amount.target if c.is_text else 0  # one over labels is next to nothing
    return float(encoder + decoder), float(head)


def predict_seconds(work: Workload, choice: ExecutionPlan, machine: Machine) -> float:
    """Predict how long a step takes whose rows are all the longest: what ways to run are compared by."""
    step = work.step_shapes.step
    tokens = choice.batch_size_per_gpu * (step.source + step.target) / work.rows
    amount = Amount.of_rows(work.rows, work.source_tokens, work.target_tokens)
    return _seconds(work, choice, machine, pace_of(machine.speed_class), amount, tokens)


def typical_seconds(work: Workload, choice: ExecutionPlan, machine: Machine, pace: Pace | None = None) -> float:
    """Predict how long the run's steps take in the mean, their rows as long as they are.

    Args:
        pace: constants of the class, as a calibration tries them; None: those of the machine's.
    """
    amount = Amount.mean_of(work.step_shapes)
    tokens = choice.batch_size_per_gpu * (amount.source + amount.target) / max(1.0, amount.rows)
    return _seconds(work, choice, machine, pace or pace_of(machine.speed_class), amount, tokens)


def evaluation_seconds(work: Workload, choice: ExecutionPlan, machine: Machine, rows: int) -> float:
    """Predict how long one evaluation takes.

    Args:
        rows: that this process evaluates.
    """
    pace, seen = pace_of(machine.speed_class), Amount.mean_of(work.evaluation_shapes)
    share = rows / max(1.0, seen.rows)
    size = min(choice.eval_batch_size_per_gpu, max(1, rows))
    tokens = size * (seen.source + seen.target) / max(1.0, seen.rows)
    rate = machine.rate(choice.compute) * pace.evaluation * _efficiency(pace, choice, work.model.d_model, tokens)
    blocks = work.model.num_layers + work.model.num_decoder_layers
    bringing, _ = moving_seconds(work, choice, machine, pace.copy_rate)
    computing = share * sum(flops_of(work.model, seen)) / rate + blocks * rows / size * pace.block_seconds
    return max(computing, rows / size * bringing)


def writing_seconds(work: Workload, choice: ExecutionPlan, machine: Machine, tokens: int, beams: int = 1) -> float:
    """Predict how long one batch of answers of so many tokens takes: each reads the decoder's weights and the head once.

    Args:
        beams: of all rows.
    """
    pace, counts = pace_of(machine.speed_class), work.counts
    blocks = work.model.num_decoder_layers
    weights = blocks * counts["decoder"] + counts["embedding"]
    reading, computing = 4 * weights / pace.memory_rate, 2 * beams * weights / machine.rate(choice.compute)
    bringing, _ = moving_seconds(work, choice, machine, pace.copy_rate)
    return tokens * max(reading + computing + blocks * pace.block_seconds, bringing)


def _seconds(
    work: Workload, choice: ExecutionPlan, machine: Machine, pace: Pace, amount: Amount, tokens: float
) -> float:
    """Of a step over `amount`, in micro-batches of so many tokens: products, passes over the weights, and the wire."""
    blocks, head = flops_of(work.model, amount)
    total_blocks = work.model.num_layers + work.model.num_decoder_layers
    recompute = 1.0 - choice.saved_blocks / total_blocks
    efficiency = _efficiency(pace, choice, work.model.d_model, tokens)
    count = work.counts["total"]
    sent = 2 * dtype_bytes(choice.compute)  # An all-reduce sends each gradient twice.
    exchange = count * (1 - 1 / machine.num_processes) * sent / WIRE_BYTES_PER_SECOND
    again = recompute * recomputed_flops(work.model, amount)
    # forward, and back to what comes before; gradients of weights are formed for those alone that learn
    passes = 2.0 + min(1.0, work.learns["total"] / count)
    computing = (passes * (blocks + head) + again) / (machine.rate(choice.compute) * efficiency)
    turning = OPTIMIZERS[work.optimizer].turns * work.learning.turn_flops
    computing += turning / (machine.rate(choice.compute) * efficiency)
    computing += total_blocks * choice.gradient_accumulation_steps * (2 + recompute) * pace.block_seconds
    values = (passes + recompute) * _activation_values(work.model, amount)
    computing += values * pace.value_flops / machine.rate("float32")
    passing = 4 * _passed(work, pace, choice) / pace.memory_rate
    passing += total_blocks * pace.update_seconds + pace.step_seconds
    busy = computing + passing
    # Offloaded weights are waited for, forward and back, each beside what it computes.
    bringing, taking = moving_seconds(work, choice, machine, pace.copy_rate)
    bringing, forward = bringing * choice.accumulation_passes, busy / (passes + recompute)
    waiting = max(0.0, bringing - forward) + max(0.0, bringing + taking - (busy - forward))
    return busy + waiting + exchange


def _efficiency(pace: Pace, choice: ExecutionPlan, d_model: int, tokens: float) -> float:
    narrow = min(1.0, pace.wide / d_model) ** 2 if pace.wide else 1.0  # wide products need fewer tokens
    malloc = {"small": pace.small_malloc, "fast": 1.0, "untrimmed": pace.untrimmed_malloc}[choice.malloc]
    return malloc * pace.efficiency * tokens / (tokens + pace.half_tokens * narrow)


def _passed(work: Workload, pace: Pace, choice: ExecutionPlan) -> float:
    updating = pace.update_passes + pace.accumulating_passes * (choice.accumulation_passes - 1)
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
    return encoder + decoder + (amount.target * c.vocab_size if c.is_text else 0)


def recomputed_flops(c: T5ModelConfig, amount: Amount) -> float:
    """FLOP of running all blocks once more for backward: a forward without the product after feed-forward."""
    blocks, _ = flops_of(c, amount)
    tokens = c.num_layers * amount.source + c.num_decoder_layers * amount.target
    return blocks - 2 * c.d_ff * c.d_model * tokens


@dataclass(frozen=True)
class Schedule:
    """What is left of a run.

    Args:
        steps: to go. evaluations, saves: how many; before each save a loss is formed. evaluation_rows: of one evaluation, on this process.
        reference_steps: whose rows a reference model sees, too, before the run or in its steps.
        sample_tokens: of the longest answer at the end. scored_batches: of answers, in each evaluation; scored_tokens: of the
            longest of them; scored_beams: of all rows of a batch, whose products take longer than reading the weights.
    """

    steps: int
    evaluations: int
    saves: int
    evaluation_rows: int
    sample_tokens: int = 0
    scored_batches: int = 0
    scored_tokens: int = 0
    scored_beams: int = 1
    reference_steps: int = 0


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


def schedule_of(config: Config, first_step: int, held_out: int, answer_tokens: int, num_processes: int = 1) -> Schedule:
    """Count what is left behind `first_step` steps.

    An evaluation comes before the first step of a run, at its turns and at the end, where one of the mean of the last
    checkpoints may follow; each that is the best is saved, and while a model learns most are.

    Args:
        config: its steps resolved. held_out: rows of the validation data. answer_tokens: of the longest answer.
    """
    train, asked = config.train, config.metrics.eval_generate_rows
    last = int(train.max_steps)

    def turns(every: int) -> set[int]:
        return {*range(first_step + every - first_step % every, last + 1, every), last}

    rows = -(-min(train.eval_rows, held_out) // num_processes)
    scored = 0 if asked == AUTO else -(-min(int(asked), held_out) // num_processes)
    written = SAMPLE_TOKENS if train.sample_rows and config.model.is_text else 0
    if first_step >= last:
        return Schedule(0, 0, 0, rows, written)
    evaluations = turns(int(train.eval_steps)) if rows else set()
    saves = evaluations | turns(int(train.save_steps))
    others = int(first_step == 0 and rows > 0) + int(train.average_checkpoints > 1 and rows > 0)
    refers = config.data.objective == PREFERENCES and config.preference.preference_loss != WITHOUT_REFERENCE
    steps, batches = last - first_step, -(-scored // ANSWERED_TOGETHER)
    beams = config.generate.num_beams * min(scored, ANSWERED_TOGETHER) if config.answer.num_answers > 1 else 1
    compared = steps if refers else 0
    return Schedule(
        steps, len(evaluations) + others, len(saves), rows, written, batches, answer_tokens, beams, compared
    )


def predict_times(work: Workload, choice: ExecutionPlan, machine: Machine, schedule: Schedule) -> Duration:
    """Predict how long what is left of a run takes, with measured speeds where there are any."""
    pace = pace_of(machine.speed_class)
    spread = pace.spread if machine.measured else pace.nominal_spread
    machine = machine.as_measured()
    step = typical_seconds(work, choice, machine)
    answers = writing_seconds(work, choice, machine, 1)
    evaluation = evaluation_seconds(work, choice, machine, schedule.evaluation_rows)
    scored = writing_seconds(work, choice, machine, schedule.scored_tokens, schedule.scored_beams)
    evaluation += schedule.scored_batches * scored
    adapters = work.trained.adapters if work.trained else 0  # saved alone, in fp32
    weights = 4 * adapters or work.counts["total"] * dtype_bytes(choice.storage)
    saved = weights + state_bytes(work)
    referred = replace(work, evaluation=work.step_shapes)
    checked = evaluation_seconds(referred, choice, machine, choice.batch_size_per_gpu)  # of a micro-batch
    around = (
        schedule.evaluations * evaluation
        + schedule.saves * (saved / pace.save_rate + checked)
        + work.counts["total"] / pace.build_rate
        + schedule.sample_tokens * answers
        + schedule.reference_steps * evaluation_seconds(referred, choice, machine, work.rows)
    )
    return Duration.within(schedule.steps * step + around, spread)


class Renewal:
    """Tells the time that is left anew, once, from what the first steps took.

    Args:
        step_seconds, total_seconds: as they were predicted, of a step and of all that was left; None: nothing was.
        steps: that were left.
    """

    def __init__(self, step_seconds: float, total_seconds: float | None, steps: int) -> None:
        self._predicted, self._steps, self._taken = step_seconds, steps, list[float]()
        self._around = max(0.0, (total_seconds or 0.0) - steps * step_seconds)

    def after_step(self, seconds: float) -> Duration | None:
        """What is left after a step that took so long; None at all steps but the one that renews."""
        if len(self._taken) >= RENEWED_STEPS or self._steps <= RENEWED_STEPS:
            return None
        self._taken.append(seconds)
        if len(self._taken) < RENEWED_STEPS:
            return None
        timed = self._taken[UNTIMED_STEPS:]
        mean = sum(timed) / len(timed)
        scatter = math.sqrt(sum((one - mean) ** 2 for one in timed)) / len(timed) / mean if mean else 0.0
        share = 1 - RENEWED_STEPS / self._steps  # of what lies around the steps, spread over them
        slower = mean / self._predicted if self._predicted else 1.0
        left = (self._steps - RENEWED_STEPS) * mean + share * slower * self._around
        return Duration.within(left, max(RENEWED_SPREAD, 2 * scatter))
