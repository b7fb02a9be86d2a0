"""How much memory and time does one way to run a step take?

The walk holds so little that it can be counted: weights, optimizer state, gradients of one block and of the shared
weights, boundaries of all slices, kept graphs, one visit's working memory, one chunk of logits. The formulas follow the
code of `model/` and `engine/` line by line; e is the bytes of the compute dtype.

Shapes: N source tokens and M target tokens of a micro-batch, D d_model, I = H K inner width of attention, F d_ff,
V vocabulary, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from config import T5ModelConfig
from memory.units import MIB

BASE_BYTES = 175 * MIB  # interpreter and libraries, where they cannot be measured
SETTLE_BYTES = 32 * MIB  # what libraries allocate in the first step, behind the measurement of the base
# What malloc keeps beyond the tensors: a share of all that comes and goes, up to a limit, for each of its tunings.
SLACK = {"small": (0.03, 64 * MIB), "fast": (1.0, 96 * MIB)}
MALLOC_SPEED = {"small": 0.55, "fast": 1.0}  # small returns every freed tensor to the system, which zeroes it again
TILE_BYTES = 14 * MIB  # buffers of one attention tile, and of an update in row chunks
GOOD_TOKENS = 2048  # tokens of a matrix product from which more bring no speed on a CPU


@dataclass(frozen=True)
class Machine:
    """What the plan needs to know of a machine.

    Args:
        budget_bytes: what the process tree of one rank may take.
        available_bytes: what is free, for the old table of first guesses.
        base_bytes: the process before the model is built.
        rates: dtype name ("float32", "bfloat16") -> measured FLOP/s of matrix products.
        num_processes: ranks that share the effective batch.
    """

    budget_bytes: int
    available_bytes: int
    base_bytes: int = BASE_BYTES
    rates: tuple[tuple[str, float], ...] = (("float32", 1e11), ("bfloat16", 1e11))
    num_processes: int = 1

    def rate(self, dtype: str) -> float:
        """FLOP/s of `dtype`, 0 where unknown."""
        return dict(self.rates).get(dtype, 0.0)


@dataclass(frozen=True)
class Work:
    """What one step has to do: rows of the effective batch on this rank, at the lengths of the longest rows."""

    model: T5ModelConfig
    rows: int
    source_tokens: int
    target_tokens: int
    dropout: bool
    optimizer: str
    rounding: str = "stochastic"
    hold_gradients: bool = False


@dataclass(frozen=True)
class Choice:
    """One way to run a step.

    Args:
        batch_size_per_gpu: rows of a micro-batch. num_slices: micro-batches that pass through a block together.
        num_walks: walks of one step; more than one holds all gradients.
        kept_blocks: blocks whose graphs are kept; the others are recomputed.
        storage, compute: dtype names of the weights at rest and in products.
        malloc: "small" or "fast", see `devices.malloc`.
    """

    batch_size_per_gpu: int
    num_slices: int
    num_walks: int
    kept_blocks: int
    eval_batch_size_per_gpu: int
    storage: str
    compute: str
    loss_chunk_bytes: int
    malloc: str = "fast"

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of one step on one rank."""
        return self.num_slices * self.num_walks


def weight_counts(c: T5ModelConfig) -> dict[str, int]:
    """Weights of the parts of a model: embedding, head, one encoder and one decoder block, and all."""
    inner, gates = c.num_heads * c.d_kv, 2 if c.feed_forward_proj.startswith("gated-") else 1
    attention, feed_forward = 4 * c.d_model * inner, (gates + 1) * c.d_model * c.d_ff
    embedding = c.vocab_size * c.d_model
    head = 0 if c.tie_word_embeddings else embedding
    encoder, decoder = attention + feed_forward + 2 * c.d_model, 2 * attention + feed_forward + 3 * c.d_model
    total = embedding + head + c.num_layers * encoder + c.num_decoder_layers * decoder + 2 * c.d_model
    tables = (c.num_layers + c.num_decoder_layers) if c.bias_in_every_layer else 2
    total += tables * c.relative_attention_num_buckets * c.num_heads
    return {"embedding": embedding, "head": head, "encoder": encoder, "decoder": decoder, "total": total}


def dtype_bytes(name: str) -> int:
    """Bytes of one number."""
    return 4 if name == "float32" else 2


def state_bytes(work: Work, storage: str) -> int:
    """Bytes of the optimizer's state and of the rounding's; the engine's own classes say the same, a test holds it."""
    c, count = work.model, weight_counts(work.model)["total"]
    remainder = count if work.rounding == "compensated" and storage == "bfloat16" else 0
    if work.optimizer == "adafactor":
        return 4 * _factors(c) + remainder
    per_weight = 2 + 8 / 128 if work.optimizer == "adamw_8bit" else 8
    return int(per_weight * count) + remainder


def _factors(c: T5ModelConfig) -> int:
    """Rows and columns of all matrices, and the vectors."""
    gates = 2 if c.feed_forward_proj.startswith("gated-") else 1
    attention, feed_forward = 4 * (_inner(c) + c.d_model), (gates + 1) * (c.d_ff + c.d_model)
    tables = (c.num_layers + c.num_decoder_layers) if c.bias_in_every_layer else 2
    return (
        (1 if c.tie_word_embeddings else 2) * (c.vocab_size + c.d_model)
        + c.num_layers * (attention + feed_forward + 2 * c.d_model)
        + c.num_decoder_layers * (2 * attention + feed_forward + 3 * c.d_model)
        + 2 * c.d_model
        + tables * (c.relative_attention_num_buckets + c.num_heads)
    )


def predict(work: Work, choice: Choice, machine: Machine) -> dict[str, dict[str, int]]:
    """Predict what each phase of a run holds at its highest: phase -> component -> bytes."""
    s = dtype_bytes(choice.storage)
    fixed = {
        "base": machine.base_bytes,
        "weights": weight_counts(work.model)["total"] * s,
        "optimizer state": state_bytes(work, choice.storage),
    }
    phases = {
        "step": {**fixed, **_step_parts(work, choice, machine.num_processes)},
        "loss": {**fixed, **_loss_parts(work, choice)},
        "evaluation": {**fixed, **_evaluation_parts(work, choice)},
        "save": {**fixed, "buffers": 4 * MIB},
    }
    share, limit = SLACK[choice.malloc]
    for parts in phases.values():
        passing = sum(parts.values()) - sum(fixed.values())
        parts["allocator slack"] = SETTLE_BYTES + min(int(share * passing), limit)
    return phases


def peak_of(phases: dict[str, dict[str, int]]) -> tuple[str, int]:
    """The highest phase and its bytes."""
    totals = {phase: sum(parts.values()) for phase, parts in phases.items()}
    highest = max(totals, key=lambda phase: totals[phase])
    return highest, totals[highest]


def _tokens(work: Work, rows: int) -> tuple[int, int]:
    return rows * work.source_tokens, rows * work.target_tokens


def _held_between(work: Work, choice: Choice) -> dict[str, int]:
    """What forward leaves for backward."""
    c, e, (n, m) = work.model, dtype_bytes(choice.compute), _tokens(work, choice.batch_size_per_gpu)
    kept_decoder = min(choice.kept_blocks, c.num_decoder_layers)
    kept = kept_decoder * sum(_decoder_graph(work, e, n, m))
    kept += (choice.kept_blocks - kept_decoder) * sum(_encoder_graph(work, e, n))
    boundaries = c.d_model * e * ((c.num_layers + 2) * n + (c.num_decoder_layers + 2) * m)
    return {"boundaries of all slices": choice.num_slices * boundaries, "kept graphs": choice.num_slices * kept}


def _step_parts(work: Work, choice: Choice, num_processes: int) -> dict[str, int]:
    """Backward of a block: its graph where it is recomputed, and the gradients of its widest layers."""
    c, e, (n, m) = work.model, dtype_bytes(choice.compute), _tokens(work, choice.batch_size_per_gpu)
    counts = weight_counts(c)
    block = max(counts["encoder"], counts["decoder"]) * e
    shared = (counts["embedding"] + counts["head"]) * e
    width = 2 * c.d_ff + 4 * c.d_model
    visit = max(width * n, width * m + 4 * _inner(c) * n) * e
    if not choice.kept_blocks:
        visit += max(sum(_encoder_graph(work, e, n)), sum(_decoder_graph(work, e, n, m)))
    holds_all = work.hold_gradients or choice.num_walks > 1
    return {
        "gradients": counts["total"] * e if holds_all else shared + block * (2 if num_processes > 1 else 1),
        **_held_between(work, choice),
        "one visit": visit + TILE_BYTES,
        "block in compute dtype": block if choice.storage != choice.compute else 0,
    }


def _loss_parts(work: Work, choice: Choice) -> dict[str, int]:
    c, e, (_, m) = work.model, dtype_bytes(choice.compute), _tokens(work, choice.batch_size_per_gpu)
    counts = weight_counts(c)
    head = counts["embedding"] * e
    holds_all = work.hold_gradients or choice.num_walks > 1
    logits = 2 * min(choice.loss_chunk_bytes, max(16, m) * 4 * c.vocab_size)
    return {
        "gradients": counts["total"] * e if holds_all else head,
        **_held_between(work, choice),
        "logits": logits + (2 * choice.num_slices + 1) * m * c.d_model * e,
        "head in compute dtype": head if choice.storage != choice.compute else 0,
    }


def _evaluation_parts(work: Work, choice: Choice) -> dict[str, int]:
    c, e, (n, m) = work.model, dtype_bytes(choice.compute), _tokens(work, choice.eval_batch_size_per_gpu)
    counts = weight_counts(c)
    cast = max(counts["embedding"], counts["encoder"], counts["decoder"]) * e
    return {
        "one visit": (c.d_ff + 6 * c.d_model + 4 * _inner(c)) * e * max(n, m) + c.d_model * e * n + TILE_BYTES,
        "logits": 2 * min(choice.loss_chunk_bytes, max(16, m) * 4 * c.vocab_size),
        "weights in compute dtype": cast if choice.storage != choice.compute else 0,
    }


def _inner(c: T5ModelConfig) -> int:
    return c.num_heads * c.d_kv


def _feed_forward_width(work: Work) -> int:
    """Activations of width F that a block's graph holds for one token."""
    gated = work.model.feed_forward_proj.startswith("gated-")
    return (4 if gated else 1) + (1 if work.dropout else 0)


def _encoder_graph(work: Work, e: int, n: int) -> tuple[int, int]:
    """Bytes that the graph of an encoder block keeps: attention part, feed-forward part."""
    c = work.model
    return (2 * c.d_model + 4 * _inner(c)) * e * n, (c.d_model + _feed_forward_width(work) * c.d_ff) * e * n


def _decoder_graph(work: Work, e: int, n: int, m: int) -> tuple[int, int]:
    """The same for a decoder block, whose cross-attention keeps keys and values of the source."""
    c = work.model
    attention = (4 * c.d_model + 6 * _inner(c)) * e * m + 2 * _inner(c) * e * n
    return attention, (c.d_model + _feed_forward_width(work) * c.d_ff) * e * m


def step_flops(c: T5ModelConfig, rows: int, source: int, target: int) -> tuple[float, float]:
    """FLOP of one forward over the blocks, and of the head."""
    counts, inner = weight_counts(c), _inner(c)
    encoder = c.num_layers * (2 * counts["encoder"] * source + 4 * inner * source**2)
    cross = 2 * (2 * c.d_model * inner) * (source - target)  # keys and values are made of the source
    decoder = c.num_decoder_layers * (
        2 * counts["decoder"] * target + cross + 2 * inner * target**2 + 4 * inner * source * target
    )
    return float(rows * (encoder + decoder)), float(rows * 2 * counts["embedding"] * target)


def predict_seconds(work: Work, choice: Choice, machine: Machine) -> float:
    """Predict how long a step takes: products at the measured rate, half of it lost to everything else, and updates."""
    blocks, head = step_flops(work.model, work.rows, work.source_tokens, work.target_tokens)
    total_blocks = work.model.num_layers + work.model.num_decoder_layers
    recompute = 1.0 - choice.kept_blocks / total_blocks
    tokens = choice.batch_size_per_gpu * (work.source_tokens + work.target_tokens)
    efficiency = MALLOC_SPEED[choice.malloc] * 0.5 * min(1.0, 0.4 + 0.6 * tokens / GOOD_TOKENS)
    count = weight_counts(work.model)["total"]
    moved = count * 4 * (6 + 3 * (choice.num_walks - 1)) + (choice.storage != choice.compute) * 3 * count * 4
    return (blocks * (3.0 + recompute) + head * 3.0) / (machine.rate(choice.compute) * efficiency) + moved / 8e9
