"""Will it fit, and what is the fastest way that does? Chooses how a run's steps are done.

`plan` lists the ways a step can run (micro-batch, slices or accumulation, graphs kept, dtype of the weights at rest),
drops those whose predicted peak is over the budget, and takes the fastest of the rest. The effective batch is never
touched. The formulas are in `memory.prediction`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from config import Config, DoesNotFit
from memory.prediction import Choice, Machine, Work, peak_of, predict, predict_seconds
from memory.units import MIB, format_size
from settings import AUTO

TABLE_THRESHOLD_BYTES = 13 * 1000**3  # the old table: below 13 GB available 1 / 2 / 8, else 2 / 4 / 16
LOSS_CHUNKS_BYTES = (32 * MIB, 16 * MIB, 8 * MIB)


@dataclass(frozen=True)
class Plan:
    """The choice, what it is predicted to take, and why.

    Args:
        components: name -> bytes at the peak, largest first. phases: phase -> predicted peak bytes.
        seconds: predicted duration of a step. num_blocks: of the model.
    """

    choice: Choice
    effective_batch_size: int
    budget_bytes: int
    peak_bytes: int
    components: dict[str, int]
    phases: dict[str, int]
    seconds: float
    num_blocks: int
    reasons: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "gradient_accumulation_steps": self.choice.gradient_accumulation_steps}


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
        accumulation = (
            accumulation if train.gradient_accumulation_steps == AUTO else int(train.gradient_accumulation_steps)
        )
        return micro * accumulation * machine.num_processes
    return micro * accumulation


def make_work(config: Config, machine: Machine, source_tokens: int | None, target_tokens: int | None) -> Work:
    """The work of one rank's share of a step; lengths that are None are the longest that the settings allow."""
    data, train = config.data, config.train
    source = source_tokens or data.max_seq_len
    if target_tokens is None:
        asked = data.max_target_len
        is_span = data.objective == "span"  # masks a share of the tokens, and adds a sentinel for each span
        share = 1.3 * data.noise_density * (1 + 1 / data.mean_noise_span_length) if is_span else 1.0
        target_tokens = math.ceil(source * share) if asked == AUTO else int(asked)
    rows = math.ceil(effective_batch(config, machine) / machine.num_processes)
    drops = config.model.dropout_rate > 0
    clips = train.max_grad_norm > 0
    return Work(config.model, rows, source, target_tokens, drops, train.optimizer, train.bf16_rounding, clips)


def choices(config: Config, machine: Machine, work: Work) -> Iterator[Choice]:
    """All ways to run the step that the settings allow."""
    total_blocks = work.model.num_layers + work.model.num_decoder_layers
    for storage, compute in _dtypes(config, machine):
        for micro in _micro_batches(config, work):
            count = math.ceil(work.rows / micro)
            for num_walks in {1, count}:
                for kept in _kept_blocks(config, total_blocks, num_walks):
                    for chunk, malloc in product(LOSS_CHUNKS_BYTES, ("fast", "small")):
                        evaluation = _evaluation_batch(config, machine, micro)
                        yield Choice(
                            micro, count // num_walks, num_walks, kept, evaluation, storage, compute, chunk, malloc
                        )


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
    config: Config,
    machine: Machine,
    *,
    source_tokens: int | None = None,
    target_tokens: int | None = None,
    earlier: Choice | None = None,
) -> Plan:
    """Choose the fastest way to run this configuration that fits the machine's budget.

    Args:
        source_tokens, target_tokens: longest row that can occur; None: as the settings allow.
        earlier: the choice of the run that is resumed; kept where it fits, so that it computes in the same order.
    Raises:
        DoesNotFit: no way fits; names the least peak and the cheapest changes.
    """
    work = make_work(config, machine, source_tokens, target_tokens)
    best: Plan | None = None
    least: Plan | None = None
    for choice in [earlier] if earlier and _fits(work, earlier, machine) else choices(config, machine, work):
        candidate = _priced(config, machine, work, choice)
        if least is None or candidate.peak_bytes < least.peak_bytes:
            least = candidate
        if candidate.peak_bytes <= machine.budget_bytes and (best is None or candidate.seconds < best.seconds):
            best = candidate
    assert least is not None, "every configuration has at least one way to run"
    if best is None:
        raise DoesNotFit(*_refusal(config, work, machine, least))
    return replace(best, reasons=_reasons(best, machine))


def _priced(config: Config, machine: Machine, work: Work, choice: Choice) -> Plan:
    phases = predict(work, choice, machine)
    highest, peak = peak_of(phases)
    components = dict(sorted(phases[highest].items(), key=lambda item: -item[1]))
    totals = {phase: sum(parts.values()) for phase, parts in phases.items()}
    seconds = predict_seconds(work, choice, machine)
    blocks = work.model.num_layers + work.model.num_decoder_layers
    return Plan(
        choice, effective_batch(config, machine), machine.budget_bytes, peak, components, totals, seconds, blocks
    )


def _fits(work: Work, choice: Choice, machine: Machine) -> bool:
    _, peak = peak_of(predict(work, choice, machine))
    rows = choice.batch_size_per_gpu * choice.gradient_accumulation_steps
    return peak <= machine.budget_bytes and rows >= work.rows > rows - choice.batch_size_per_gpu


def _reasons(chosen: Plan, machine: Machine) -> tuple[str, ...]:
    micro, _, accumulation = table_guess(machine.available_bytes)
    choice = chosen.choice
    ways = "through each block together" if choice.num_walks == 1 else "one after the other, gradients held"
    notes = [
        f"first guess by available memory: micro-batch {micro} x {accumulation}",
        f"planned: {choice.batch_size_per_gpu} x {choice.gradient_accumulation_steps}, {ways}",
    ]
    if choice.storage != choice.compute:
        notes.append(f"{choice.storage} at rest saves memory; products in {choice.storage} are slow here")
    return tuple(notes)


def _refusal(config: Config, work: Work, machine: Machine, least: Plan) -> list[str]:
    lines = [
        f"--memory_budget = {format_size(machine.budget_bytes)}, does not hold this run: the least it needs is about "
        f"{format_size(least.peak_bytes)} ("
        + ", ".join(f"{k} {format_size(v)}" for k, v in list(least.components.items())[:4])
        + ")"
    ]
    ideas = [
        ("mixed_precision=bf16", replace(least.choice, storage="bfloat16"), work),
        (
            "batch_size_per_gpu=1",
            replace(least.choice, batch_size_per_gpu=1, num_slices=work.rows, num_walks=1, kept_blocks=0),
            work,
        ),
        (
            f"max_seq_len={config.data.max_seq_len // 2}",
            least.choice,
            replace(work, source_tokens=work.source_tokens // 2),
        ),
        ("effective_batch_size=1", replace(least.choice, batch_size_per_gpu=1, num_slices=1), replace(work, rows=1)),
        ("optimizer=adafactor", least.choice, replace(work, optimizer="adafactor")),
    ]
    savings = []
    for flag, choice, changed in ideas:
        saved = least.peak_bytes - peak_of(predict(changed, choice, machine))[1]
        if saved > MIB:
            savings.append((saved, f"--{flag} would save about {format_size(saved)}"))
    savings.append((machine.base_bytes, f"--memory_budget={math.ceil(least.peak_bytes / MIB)}M would hold it as it is"))
    return lines + [text for _, text in sorted(savings, reverse=True)[:3]]
