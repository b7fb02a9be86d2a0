"""Will it fit, and what is the fastest way that does? Predicts the peak of a run, part by part, and chooses.

The walk holds so little that it can be counted: weights, optimizer state, gradients of one block and of the shared
weights, boundaries of all slices, kept graphs, one visit's working memory, one chunk of logits. The formulas below follow
the code of `model/` and `engine/` line by line; e is the bytes of the compute dtype.
`plan` lists the ways a step can run (micro-batch, slices or accumulation, graphs kept, storage dtype), drops those that do
not fit, and takes the fastest of the rest. The effective batch is never touched.

Shapes: N source tokens and M target tokens of a micro-batch, D d_model, I = H K inner width of attention, F d_ff,
V vocabulary, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from config import Config, DoesNotFit, T5ModelConfig
from memory.units import MIB, format_size
from settings import AUTO

TABLE_THRESHOLD_BYTES = 13 * 1000**3  # the old table: below 13 GB available 1 / 2 / 8, else 2 / 4 / 16
BASE_BYTES = 300 * MIB  # interpreter and libraries, where they cannot be measured
SLACK_SHARE = 0.06  # what the allocator holds beyond the tensors, of everything but the base
TILE_BYTES = 14 * MIB  # buffers of one attention tile, and of an update in row chunks
LOSS_CHUNKS_BYTES = (32 * MIB, 16 * MIB, 8 * MIB)
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
    optimizer_elements: int
    hold_gradients: bool = False


@dataclass(frozen=True)
class Choice:
    """One way to run a step.

    Args:
        batch_size_per_gpu: rows of a micro-batch. num_slices: micro-batches that pass through a block together.
        num_walks: walks of one step; more than one holds all gradients.
        kept_blocks: blocks whose graphs are kept; the others are recomputed.
        storage, compute: dtype names of the weights at rest and in products.
    """

    batch_size_per_gpu: int
    num_slices: int
    num_walks: int
    kept_blocks: int
    eval_batch_size_per_gpu: int
    storage: str
    compute: str
    loss_chunk_bytes: int

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of one step on one rank."""
        return self.num_slices * self.num_walks


@dataclass(frozen=True)
class Plan:
    """The choice, what it is predicted to take, and why.

    Args:
        components: name -> bytes at the peak, largest first. phases: phase -> predicted peak bytes.
        seconds: predicted duration of a step.
    """

    choice: Choice
    effective_batch_size: int
    budget_bytes: int
    peak_bytes: int
    components: dict[str, int]
    phases: dict[str, int]
    seconds: float
    reasons: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "gradient_accumulation_steps": self.choice.gradient_accumulation_steps}


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


def predict(work: Work, choice: Choice, base_bytes: int, num_processes: int = 1) -> tuple[dict[str, int], dict[str, int]]:
    """Predict the peak of a run.

    Returns:
        components at the highest phase (name -> bytes) and the peak of each phase (phase -> bytes).
    """
    c, e, s = work.model, dtype_bytes(choice.compute), dtype_bytes(choice.storage)
    counts, cast = weight_counts(c), choice.storage != choice.compute
    n, m = choice.batch_size_per_gpu * work.source_tokens, choice.batch_size_per_gpu * work.target_tokens
    slices, block = choice.num_slices, max(counts["encoder"], counts["decoder"])
    fixed = {"base": base_bytes, "weights": counts["total"] * s, "optimizer state": work.optimizer_elements * 4}
    hold = work.hold_gradients or choice.num_walks > 1
    shared_gradients = (counts["embedding"] + counts["head"]) * e
    gradients = counts["total"] * e if hold else shared_gradients + block * e * (2 if num_processes > 1 else 1)
    boundaries = slices * c.d_model * e * ((c.num_layers + 2) * n + (c.num_decoder_layers + 2) * m)
    encoder_graph, decoder_graph = (sum(graph) for graph in (_encoder_graph(work, e, n), _decoder_graph(work, e, n, m)))
    kept_decoder = min(choice.kept_blocks, c.num_decoder_layers)
    kept = slices * (kept_decoder * decoder_graph + (choice.kept_blocks - kept_decoder) * encoder_graph)
    # backward of a block: its graph where it is recomputed, and the gradients of its widest layers
    work_encoder, work_decoder = (2 * c.d_ff + 4 * c.d_model) * e * n, ((2 * c.d_ff + 4 * c.d_model) * m + 4 * _inner(c) * n) * e
    recomputed = 0 if choice.kept_blocks else max(encoder_graph, decoder_graph)
    visit = max(work_encoder, work_decoder) + recomputed + TILE_BYTES
    head_cast = (counts["embedding"] * e) if cast else 0
    chunk = 2 * min(choice.loss_chunk_bytes, max(16, m) * 4 * c.vocab_size) + (2 * slices + 1) * m * c.d_model * e

    step = {
        **fixed,
        "gradients": gradients,
        "boundaries of all slices": boundaries,
        "kept graphs": kept,
        "one visit": visit,
        "block in compute dtype": block * e if cast else 0,
    }
    loss = {
        **fixed,
        "gradients": counts["total"] * e if hold else (counts["embedding"] if c.tie_word_embeddings else counts["head"]) * e,
        "boundaries of all slices": boundaries,
        "kept graphs": kept,
        "logits": chunk,
        "head in compute dtype": head_cast,
    }
    eval_n, eval_m = choice.eval_batch_size_per_gpu * work.source_tokens, choice.eval_batch_size_per_gpu * work.target_tokens
    evaluation = {
        **fixed,
        "one visit": (c.d_ff + 6 * c.d_model + 4 * _inner(c)) * e * max(eval_n, eval_m) + c.d_model * e * eval_n + TILE_BYTES,
        "logits": 2 * min(choice.loss_chunk_bytes, max(16, eval_m) * 4 * c.vocab_size),
        "head in compute dtype": max(head_cast, block * e if cast else 0),
    }
    phases = {"step": step, "loss": loss, "evaluation": evaluation, "save": {**fixed, "buffers": 4 * MIB}}
    for parts in phases.values():
        parts["allocator slack"] = int(SLACK_SHARE * (sum(parts.values()) - base_bytes))
    peaks = {phase: sum(parts.values()) for phase, parts in phases.items()}
    highest = phases[max(peaks, key=lambda phase: peaks[phase])]
    return dict(sorted(highest.items(), key=lambda item: -item[1])), peaks


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
    decoder = c.num_decoder_layers * (2 * counts["decoder"] * target + cross + 2 * inner * target**2 + 4 * inner * source * target)
    return float(rows * (encoder + decoder)), float(rows * 2 * counts["embedding"] * target)


def predict_seconds(work: Work, choice: Choice, machine: Machine) -> float:
    """Predict how long a step takes: products at the measured rate, half of it lost to everything else, and updates."""
    blocks, head = step_flops(work.model, work.rows, work.source_tokens, work.target_tokens)
    total_blocks = work.model.num_layers + work.model.num_decoder_layers
    recompute = 1.0 - choice.kept_blocks / total_blocks
    tokens = choice.batch_size_per_gpu * (work.source_tokens + work.target_tokens)
    efficiency = 0.5 * min(1.0, 0.4 + 0.6 * tokens / GOOD_TOKENS)
    count = weight_counts(work.model)["total"]
    moved = count * 4 * (6 + 3 * (choice.num_walks - 1)) + (choice.storage != choice.compute) * 3 * count * 4
    return (blocks * (3.0 + recompute) + head * 3.0) / (machine.rate(choice.compute) * efficiency) + moved / 8e9


def table_guess(available_bytes: int) -> tuple[int, int, int]:
    """The old table's first guess: micro-batch, evaluation batch, accumulation."""
    return (1, 2, 8) if available_bytes < TABLE_THRESHOLD_BYTES else (2, 4, 16)


def effective_batch(config: Config, machine: Machine) -> int:
    """Rows of one step: as given, else what micro-batch and accumulation give, else the old table's."""
    train, (micro, _, accumulation) = config.train, table_guess(machine.available_bytes)
    if train.effective_batch_size != AUTO:
        return int(train.effective_batch_size)
    if train.batch_size_per_gpu != AUTO or train.gradient_accumulation_steps != AUTO:
        micro = micro if train.batch_size_per_gpu == AUTO else int(train.batch_size_per_gpu)
        accumulation = accumulation if train.gradient_accumulation_steps == AUTO else int(train.gradient_accumulation_steps)
        return micro * accumulation * machine.num_processes
    return micro * accumulation


def make_work(config: Config, machine: Machine, source_tokens: int, target_tokens: int, state_elements: int) -> Work:
    """The work of one rank's share of a step."""
    rows = math.ceil(effective_batch(config, machine) / machine.num_processes)
    hold = config.train.max_grad_norm > 0
    drop = config.model.dropout_rate > 0
    return Work(config.model, rows, source_tokens, target_tokens, drop, state_elements, hold)


def choices(config: Config, machine: Machine, work: Work) -> Iterator[Choice]:
    """All ways to run the step that the settings allow."""
    total_blocks = work.model.num_layers + work.model.num_decoder_layers
    for storage, compute in _dtypes(config, machine):
        for micro in _micro_batches(config, work):
            count = math.ceil(work.rows / micro)
            for num_walks in {1, count}:
                for kept in _kept_blocks(config, total_blocks, num_walks):
                    for chunk in LOSS_CHUNKS_BYTES:
                        evaluation = _evaluation_batch(config, machine, micro)
                        yield Choice(micro, count // num_walks, num_walks, kept, evaluation, storage, compute, chunk)


def _dtypes(config: Config, machine: Machine) -> list[tuple[str, str]]:
    fast = "bfloat16" if machine.rate("bfloat16") > 1.2 * machine.rate("float32") else "float32"
    ways = {
        "no": [("float32", "float32")],
        "bf16": [("bfloat16", fast)],
        "fp16": [("bfloat16", fast)],
        AUTO: [("bfloat16", "bfloat16")] if fast == "bfloat16" else [("float32", "float32"), ("bfloat16", "float32")],
    }[config.memory.mixed_precision]
    if config.memory.mixed_precision == AUTO and config.memory.memory_mode == "ultra":
        ways = ways[-1:]
    return ways


def _micro_batches(config: Config, work: Work) -> list[int]:
    train = config.train
    if train.batch_size_per_gpu != AUTO:
        return [min(int(train.batch_size_per_gpu), work.rows)]
    if train.gradient_accumulation_steps != AUTO:
        return [math.ceil(work.rows / int(train.gradient_accumulation_steps))]
    return sorted({math.ceil(work.rows / parts) for parts in range(1, work.rows + 1)})


def _kept_blocks(config: Config, total: int, num_walks: int) -> list[int]:
    if config.memory.gradient_checkpointing is True or config.memory.memory_mode == "ultra":
        return [0]
    if config.memory.gradient_checkpointing is False or num_walks > 1 or config.memory.memory_mode == "standard":
        return [total]
    return list(range(0, total + 1))


def _evaluation_batch(config: Config, machine: Machine, micro: int) -> int:
    given = config.train.eval_batch_size_per_gpu
    return max(micro, table_guess(machine.available_bytes)[1]) if given == AUTO else int(given)


def plan(
    config: Config, machine: Machine, *, source_tokens: int, target_tokens: int, state_elements: int, earlier: Choice | None = None
) -> Plan:
    """Choose the fastest way to run this configuration that fits the machine's budget.

    Args:
        source_tokens, target_tokens: longest row that can occur.
        state_elements: fp32 numbers of the optimizer's state.
        earlier: the choice of the run that is resumed; kept where it fits, so that it computes in the same order.
    Raises:
        DoesNotFit: no way fits; names the least peak and the cheapest changes.
    """
    work = make_work(config, machine, source_tokens, target_tokens, state_elements)
    best: Plan | None = None
    least: Plan | None = None
    for choice in [earlier] if earlier and _fits(work, earlier, machine) else choices(config, machine, work):
        components, phases = predict(work, choice, machine.base_bytes, machine.num_processes)
        peak, seconds = max(phases.values()), predict_seconds(work, choice, machine)
        candidate = Plan(
            choice, effective_batch(config, machine), machine.budget_bytes, peak, components, phases, seconds
        )
        if least is None or peak < least.peak_bytes:
            least = candidate
        if peak <= machine.budget_bytes and (best is None or seconds < best.seconds):
            best = candidate
    assert least is not None, "every configuration has at least one way to run"
    if best is None:
        raise DoesNotFit(*_refusal(config, work, machine, least))
    return replace(best, reasons=_reasons(best, machine))


def _fits(work: Work, choice: Choice, machine: Machine) -> bool:
    _, phases = predict(work, choice, machine.base_bytes, machine.num_processes)
    rows = choice.batch_size_per_gpu * choice.gradient_accumulation_steps
    return max(phases.values()) <= machine.budget_bytes and rows >= work.rows > rows - choice.batch_size_per_gpu


def _reasons(chosen: Plan, machine: Machine) -> tuple[str, ...]:
    micro, _, accumulation = table_guess(machine.available_bytes)
    choice = chosen.choice
    ways = f"{choice.num_slices} slices through each block" if choice.num_walks == 1 else f"{choice.num_walks} accumulated walks"
    notes = [
        f"first guess by available memory: micro-batch {micro} x {accumulation}; "
        f"planned: {choice.batch_size_per_gpu} x {choice.gradient_accumulation_steps} ({ways}), "
        f"effective batch {chosen.effective_batch_size}"
    ]
    if choice.storage != choice.compute:
        notes.append(f"weights stored in {choice.storage}, computed in {choice.compute}: products in {choice.storage} are slow here")
    return tuple(notes)


def _refusal(config: Config, work: Work, machine: Machine, least: Plan) -> list[str]:
    lines = [
        f"--memory_budget = {format_size(machine.budget_bytes)}, does not hold this run: the least it needs is about "
        f"{format_size(least.peak_bytes)} (" + ", ".join(f"{k} {format_size(v)}" for k, v in list(least.components.items())[:4]) + ")"
    ]
    ideas = [
        ("mixed_precision=bf16", replace(least.choice, storage="bfloat16"), work),
        ("batch_size_per_gpu=1", replace(least.choice, batch_size_per_gpu=1, num_slices=work.rows, num_walks=1, kept_blocks=0), work),
        (f"max_seq_len={config.data.max_seq_len // 2}", least.choice, replace(work, source_tokens=work.source_tokens // 2)),
        ("effective_batch_size=1", replace(least.choice, batch_size_per_gpu=1, num_slices=1), replace(work, rows=1)),
        ("optimizer=adafactor", least.choice, replace(work, optimizer_elements=work.optimizer_elements // 100)),
    ]
    savings = []
    for flag, choice, changed in ideas:
        _, phases = predict(changed, choice, machine.base_bytes, machine.num_processes)
        saved = least.peak_bytes - max(phases.values())
        if saved > MIB:
            savings.append((saved, f"--{flag} would save about {format_size(saved)}"))
    savings.append((machine.base_bytes, f"--memory_budget={math.ceil(least.peak_bytes / MIB)}M would hold it as it is"))
    return lines + [text for _, text in sorted(savings, reverse=True)[:3]]
