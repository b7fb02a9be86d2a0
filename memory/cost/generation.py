"""How much memory does it take to write answers, or to measure the loss of right ones, and how many at once fit?

Writing has two heights: the encoder's pass over a group of prompts, and a step with its logits; keys and values stand
beside both. The formulas follow `model/decoding/kv_cache.py`; e is the bytes of the compute dtype.

Shapes: B prompts, G beams of each, S source tokens, T answer tokens, D d_model, I = H K inner width of attention,
F d_ff, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from config import T5ModelConfig
from limits import ENCODER_TOKENS, HEAP_BELOW, LOSS_CHUNK_BYTES
from memory.cost.blocks import Blocks
from memory.cost.precision import BFLOAT16, dtype_bytes
from memory.cost.shapes import Shapes, Tokens
from memory.cost.step_peaks import blocks_of, evaluation_parts
from memory.cost.work import Choice, Machine, Work
from model.shapes import inner_width, weight_counts
from units import MIB

CAST_BYTES = 16 * MIB  # of a table that is widened in pieces
LIBRARIES_BYTES = 32 * MIB  # what libraries allocate at the first products, and small things of Python
SLACK, LOSS_SLACK = 0.1, 0.2  # share of temporary memory that malloc holds
# At most, besides: gaps in a heap that no step of writing trims. A small tensor that stays in the gap of a large one lets the
# next large one find none; which ones stay differs from run to run (the same work took 141 to 183 MiB in some twenty).
GAP_BYTES = 3 * HEAP_BELOW
REQUEST_BYTES = 128 * 1024  # of a request that is taken: its text, tokens and connection
MOST_ROWS = 64  # more at once bring little speed on a CPU


@dataclass(frozen=True)
class Writing:
    """What is written at once.

    Args:
        rows: B. source_tokens: S of the longest prompt. new_tokens: T of the longest answer. beams: G.
        sampled: whether tokens are drawn, for which scores are sorted.
    """

    rows: int
    source_tokens: int
    new_tokens: int
    beams: int = 1
    sampled: bool = False


@dataclass(frozen=True)
class Weights:
    """How a model is held in memory.

    Args:
        bytes: of all weights at rest. is_cast: whether they rest in another dtype than they are computed in. compute: its name.
    """

    bytes: int
    is_cast: bool
    compute: str


def predict_generation(model: T5ModelConfig, weights: Weights, writing: Writing, base_bytes: int) -> dict[str, int]:
    """Predict what writing holds at its highest: component -> bytes.

    Args:
        base_bytes: the process before the model is loaded.
    """
    e, inner, counts = dtype_bytes(weights.compute), inner_width(model), weight_counts(model)
    w, number = writing, inner * e
    one = number * w.rows * max(w.source_tokens, w.beams * w.new_tokens)  # keys or values of one block
    encoder = _encoder_bytes(model, e, w)
    step = one + _logits_bytes(model, e, w)  # rows that leave, and buffers that grow, are copied one tensor at a time
    passing = max(encoder, step)
    block = max(counts["encoder"], counts["decoder"]) * e  # of fp32 weights; narrow ones are widened in pieces
    return {
        "base": base_bytes,
        "libraries": LIBRARIES_BYTES,
        "weights": weights.bytes,
        "keys and values": 2 * model.num_decoder_layers * number * w.rows * (w.source_tokens + w.beams * w.new_tokens),
        "encoder" if encoder >= step else "logits": passing,
        "weights in compute dtype": CAST_BYTES + (block if weights.compute == "float16" else 0)
        if weights.is_cast
        else 0,
        "allocator slack": int(SLACK * passing) + min(passing, GAP_BYTES),
    }


def predict_loss(
    model: T5ModelConfig, weights: Weights, rows: int, longest: tuple[int, int], base_bytes: int
) -> dict[str, int]:
    """Predict what measuring the loss of a batch holds at its highest: component -> bytes.

    Args:
        rows: of the batch. longest: source and target tokens of the longest row. base_bytes: as `predict_generation`.
    """
    work = Work(model, rows, *longest, dropout=False, optimizer="adafactor", evaluation=Shapes.longest(rows, *longest))
    storage = BFLOAT16 if weights.is_cast else weights.compute
    choice = Choice(rows, 1, 1, 0, rows, storage, weights.compute, LOSS_CHUNK_BYTES)
    machine = Machine(0, 0)
    passing = evaluation_parts(work, choice, machine)
    tiles = blocks_of(work, choice, machine, is_evaluation=True).tile_bytes()  # small tensors, which stay in the heap
    slack = int(LOSS_SLACK * sum(passing.values())) + tiles
    fixed = {"base": base_bytes, "libraries": LIBRARIES_BYTES, "weights": weights.bytes}
    return {**fixed, **passing, "allocator slack": slack}


@dataclass(frozen=True)
class Capacity:
    """What may be written at once by rows that come and go.

    Args:
        rows: most answers. tokens: of their prompts and answers together. parts: component -> bytes, at the highest.
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
    token = 2 * model.num_decoder_layers * inner_width(model) * dtype_bytes(weights.compute)
    one = longest.source_tokens + longest.new_tokens
    rows = max(1, min(longest.rows, MOST_ROWS))
    while rows:
        # prompts are read one by one, and no buffer of a row grows
        fixed = predict_generation(model, weights, replace(longest, rows=1), base_bytes)
        fixed["keys and values"] = 0
        fixed["logits"] = _logits_bytes(model, dtype_bytes(weights.compute), replace(longest, rows=rows))
        fixed["requests"] = REQUEST_BYTES * (rows + waiting) + reading_bytes
        left = total_bytes - sum(fixed.values())
        tokens = min(int(left / (token * (1 + SLACK))), rows * one)
        if tokens >= one:
            held = tokens * token
            fixed |= {"keys and values": held, "allocator slack": fixed["allocator slack"] + int(SLACK * held)}
            return Capacity(rows, tokens, fixed)
        rows //= 2
    return None


def _encoder_bytes(model: T5ModelConfig, e: int, w: Writing) -> int:
    """One pass with as many prompts as go together, and their output as keys and values of one block."""
    tokens = min(w.rows * w.source_tokens, max(ENCODER_TOKENS, w.source_tokens))
    rows = max(1, tokens // w.source_tokens)
    blocks = Blocks(model, e, False, Tokens(tokens, 1), ((w.source_tokens, 1),) * rows)
    return blocks.encoder_forward() + 2 * tokens * model.d_model * e + 8 * tokens


def _logits_bytes(model: T5ModelConfig, e: int, w: Writing) -> int:
    """Scores (B G, V) in fp32, and what is made of them: log-probabilities, or sorted scores with their places."""
    number = 4 + (0 if e == 4 else e)
    number += 8 if w.beams > 1 else 24 if w.sampled else 0
    return w.rows * w.beams * model.vocab_size * number


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
