"""Memory of generating answers, or of measuring the loss of right ones, and how many fit at once.

Writing has two heights: the encoder's pass over a group of prompts, and a step with its logits; keys and values stand
beside both. The formulas follow `model/decoding/kv_cache.py`; e is the bytes of the compute dtype.

Shapes: B prompts, G beams of each, S source tokens, T answer tokens, D d_model, I = H K inner width of attention,
F d_ff, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from limits import ENCODER_TOKENS, HEAP_BELOW, KERNEL_WIDTHS, LOSS_CHUNK_BYTES, TILE_ELEMENTS, few_places, filled_tokens
from memory.estimate.blocks import Blocks
from memory.estimate.peaks import blocks_of, evaluation_parts
from memory.estimate.precision import BFLOAT16, dtype_bytes
from memory.estimate.shapes import Shapes, Tokens
from memory.estimate.workload import ExecutionPlan, Machine, Workload
from memory.monitor import Monitor
from model.shapes import inner_width, weight_counts
from settings.declared import GenerateConfig, T5ModelConfig
from units import MIB

CAST_BYTES = 4 * MIB  # of a table that is widened in pieces
LIBRARIES_BYTES = 20 * MIB  # what libraries allocate at the first products, and small things of Python
SMALL_LIBRARIES_BYTES = 14 * MIB  # the same where malloc keeps the heap small
LOSS_LIBRARIES_BYTES = 40 * MIB  # the same where losses are measured
# What oneDNN keeps besides of each size of a bf16 product, of so many at most, and the gaps between them in the heap.
PRODUCT_BYTES, MOST_PRODUCTS, MOST_SIZES = 3 * MIB // 4, 32, 8
SLACK, LOSS_SLACK = 0.1, 0.2  # share of temporary memory that malloc holds
# The end of the heap, which malloc gives back from 8 MiB on, and a tensor whose gap the next one does not fit.
GAP_BYTES = 2 * HEAP_BELOW
REQUEST_BYTES = 128 * 1024  # of a request that is taken: its text, tokens and connection
MARGIN = 0.02  # by which the same work takes more in one run than in another
CHOICE_BYTES = 48  # of a token that a list of answers allows: id and place on the host and on the device, and score
ANSWERS = "answers"  # the monitor's phase
MOST_ROWS = 64  # more at once bring little speed on a CPU


@dataclass(frozen=True)
class Writing:
    """What is written at once.

    Args:
        rows: B. source_tokens: S of the longest prompt. new_tokens: T of the longest answer. beams: G.
        sampled: whether tokens are drawn from the best, for which scores are sorted.
        choices: most tokens that a list of answers allows next; 0: there is no list.
    """

    rows: int
    source_tokens: int
    new_tokens: int
    beams: int = 1
    sampled: bool = False
    choices: int = 0

    @classmethod
    def by(cls, how: GenerateConfig, rows: int, source_tokens: int) -> Writing:
        """What settings of answers ask for."""
        is_sorted = how.temperature > 0.0 and (how.top_k > 0 or how.top_p < 1.0)
        return cls(rows, source_tokens, how.max_new_tokens, how.num_beams, is_sorted)


@dataclass(frozen=True)
class Weights:
    """How a model is held in memory.

    Args:
        bytes: of all weights at rest. is_cast: whether they rest in another dtype than they are computed in. compute: its name.
        kernels: whether compiled kernels compute.
        small_heap: whether malloc gives back what is freed at once: slower, and nothing grows from prompt to prompt.
    """

    bytes: int
    is_cast: bool
    compute: str
    kernels: bool = False
    small_heap: bool = False


def predict_generation(model: T5ModelConfig, weights: Weights, writing: Writing, base_bytes: int) -> dict[str, int]:
    """Predict what writing holds at its highest: component -> bytes.

    Args:
        base_bytes: the process before the model is loaded.
    """
    e = dtype_bytes(weights.compute)
    w, token = writing, _token_bytes(model, weights) * writing.rows
    source, own = token * w.source_tokens, token * w.beams * w.new_tokens
    # rows that leave, and buffers that grow, are copied one tensor at a time
    step = inner_width(model) * e * w.rows * max(w.source_tokens, w.beams * w.new_tokens) + _step_bytes(model, e, w)
    encoder = _encoder_bytes(model, weights, w)
    # the buffers of answers are mapped, and not there before they are written to
    is_reading = encoder + _slack(encoder, weights) >= own + step + _slack(step, weights)
    passing = encoder if is_reading else step
    held = _fixed(model, weights, base_bytes, passing)
    if weights.compute == BFLOAT16:
        # what is kept of products with keys and with values, of each number of keys and of rows that are still being written
        keys = len({filled_tokens(length) for length in range(1, min(w.new_tokens, 2**12) + 1)})
        held["libraries"] += PRODUCT_BYTES * min(MOST_PRODUCTS, 2 * keys * min(w.rows, MOST_SIZES))
    parts = held | {
        "keys and values": source + (0 if is_reading else own),
        "encoder" if is_reading else "logits": passing,
    }
    parts["allocator slack"] += int(MARGIN * sum(parts.values()))
    return parts


def _token_bytes(model: T5ModelConfig, weights: Weights) -> int:
    """Keys and values of one token in all decoder blocks."""
    return 2 * model.num_decoder_layers * inner_width(model) * dtype_bytes(weights.compute)


def _fixed(model: T5ModelConfig, weights: Weights, base_bytes: int, passing: int) -> dict[str, int]:
    """What is held whatever is written, beside what comes and goes at the highest."""
    counts, cast = weight_counts(model), CAST_BYTES if weights.is_cast else 0
    if weights.is_cast and weights.compute == "float16":  # of fp32 weights; narrow ones are widened in pieces
        cast += 2 * max(counts["encoder"], counts["decoder"])
    return {
        "base": base_bytes,
        "libraries": SMALL_LIBRARIES_BYTES if weights.small_heap else LIBRARIES_BYTES,
        "weights": weights.bytes,
        "weights in compute dtype": cast,
        "allocator slack": _slack(passing, weights),
    }


def _slack(passing: int, weights: Weights) -> int:
    return int(SLACK * passing) + (0 if weights.small_heap else min(passing, GAP_BYTES))


def predict_loss(
    model: T5ModelConfig, weights: Weights, rows: int, longest: tuple[int, int], base_bytes: int
) -> dict[str, int]:
    """Predict what measuring the loss of a batch holds at its highest: component -> bytes.

    Args:
        rows: of the batch. longest: source and target tokens of the longest row. base_bytes: as `predict_generation`.
    """
    shapes = Shapes.longest(rows, *longest)
    work = Workload(model, rows, *longest, dropout=False, optimizer="adafactor", evaluation=shapes)
    storage = BFLOAT16 if weights.is_cast else weights.compute
    choice = ExecutionPlan(rows, 1, 1, 0, rows, storage, weights.compute, LOSS_CHUNK_BYTES)
    machine = Machine(0, 0)
    passing = evaluation_parts(work, choice, machine)
    tiles = blocks_of(work, choice, machine, is_evaluation=True).tile_bytes()  # small tensors, which stay in the heap
    slack = int(LOSS_SLACK * sum(passing.values())) + tiles
    fixed = {"base": base_bytes, "libraries": LOSS_LIBRARIES_BYTES, "weights": weights.bytes}
    parts = {**fixed, **passing, "allocator slack": slack}
    parts["allocator slack"] += int(MARGIN * sum(parts.values()))
    return parts


@dataclass(frozen=True)
class Capacity:
    """What may be written at once by rows that come and go.

    Args:
        rows: most answers. tokens: of their prompts and answers together, each padded to the longest. parts: component -> bytes, at the highest.
    """

    rows: int
    tokens: int
    parts: dict[str, int]


def serving_capacity(
    model: T5ModelConfig,
    weights: Weights,
    longest: Writing,
    base_bytes: int,
    total_bytes: int,
    waiting: int,
    reading_bytes: int = 0,
) -> Capacity | None:
    """How many rows, and tokens of them, a budget holds; None where not even one of the longest fits.

    Args:
        longest: the most rows asked for, the longest prompt and answer. base_bytes, total_bytes: see `predict_generation`.
        waiting: requests that may be held beside those being written.
        reading_bytes: what requests may hold together until it is known what they ask for.
    """
    token = _token_bytes(model, weights)
    one = longest.source_tokens + longest.new_tokens
    rows = max(1, min(longest.rows, MOST_ROWS))
    while rows:
        # prompts are read one by one, between two steps
        one_row, all_rows = replace(longest, rows=1), replace(longest, rows=rows)
        fixed = _passing(model, weights, one_row, all_rows, base_bytes)
        fixed["requests"] = REQUEST_BYTES * (rows + waiting) + reading_bytes
        left = total_bytes - sum(fixed.values())
        # a buffer that grows is there twice
        beside = SLACK + 1 / (2 * model.num_decoder_layers)
        tokens = min(int(left / (token * (1 + beside))), few_places(rows) * one)
        if tokens >= one:
            held = tokens * token
            fixed |= {"keys and values": held, "allocator slack": fixed["allocator slack"] + int(beside * held)}
            return Capacity(rows, tokens, fixed)
        rows //= 2
    return None


def _passing(
    model: T5ModelConfig, weights: Weights, one_row: Writing, all_rows: Writing, base_bytes: int
) -> dict[str, int]:
    reading, step = _encoder_bytes(model, weights, one_row), _step_bytes(model, dtype_bytes(weights.compute), all_rows)
    highest = max(reading, step)
    return _fixed(model, weights, base_bytes, highest) | {"encoder" if reading >= step else "logits": highest}


def _encoder_bytes(model: T5ModelConfig, weights: Weights, w: Writing) -> int:
    e = dtype_bytes(weights.compute)
    tokens = min(w.rows * w.source_tokens, max(ENCODER_TOKENS, w.source_tokens))
    rows = max(1, tokens // w.source_tokens)
    blocks = Blocks(
        model, e, False, Tokens(tokens, 1), ((w.source_tokens, 1),) * rows,
        kernels=weights.kernels and model.d_kv in KERNEL_WIDTHS,
    )  # fmt: skip
    return blocks.encoder_answering() + tokens * model.d_model * e + 8 * tokens


def _step_bytes(model: T5ModelConfig, e: int, w: Writing) -> int:
    """Scores and weights of a tile of attention, and the logits (B G, V) in fp32 with what is made of them.

    That is log-probabilities, or sorted scores with their places and probabilities.
    """
    beams = w.rows * w.beams
    keys = max(w.source_tokens, w.beams * w.new_tokens)
    row = w.beams * model.num_heads * keys
    tile = 2 * e * max(row, min(TILE_ELEMENTS, w.rows * row))
    seen = w.rows * w.beams**2 * w.new_tokens if w.beams > 1 else 0
    logits = beams * model.vocab_size * (4 + max(0 if e == 4 else e, 17 if w.sampled else 4))
    return tile + 2 * seen + logits + CHOICE_BYTES * beams * w.choices


class AnswerBudget:
    """Keeps writing inside a budget: what a batch took beyond its prediction is added to those of the next ones.

    Args:
        predict: bytes of everything that is held at the highest. total_bytes: that may be. monitor: measures what is.
    """

    def __init__(self, predict: Callable[[Writing], int], total_bytes: int, monitor: Monitor) -> None:
        self.predict, self.total_bytes, self.monitor = predict, total_bytes, monitor
        self.excess_bytes = self._highest = 0

    def fits(self, writing: Writing) -> bool:
        """Whether the budget holds it, as predicted."""
        return self.predict(writing) <= self.total_bytes

    def most(self, writing: Writing) -> int:
        """So many rows of `writing` as fit, by what has been measured too: at least one where the prediction says so; else 0."""
        measured = most_rows(lambda w: self.predict(w) + self.excess_bytes <= self.total_bytes, writing)
        return measured or int(self.fits(replace(writing, rows=1)))

    @contextmanager
    def measuring(self, writing: Writing) -> Iterator[None]:
        """Watch while these are written."""
        with self.monitor.phase(ANSWERS):
            yield
        self._highest = max(self._highest, self.predict(writing))
        self.excess_bytes = max(0, self.monitor.phase_peaks[ANSWERS] - self._highest)


def most_rows(fits: Callable[[Writing], bool], writing: Writing) -> int:
    """The largest power of two of rows that fits, 0 if not even one does.

    Args:
        fits: whether a `Writing` fits.
        writing: its rows are the upper limit.
    """
    rows = 1 << (max(1, min(writing.rows, MOST_ROWS)).bit_length() - 1)
    while rows and not fits(replace(writing, rows=rows)):
        rows //= 2
    return rows
