"""The work of a step: how many rows, how long, into which micro-batches it may be cut; and what is decided before any
plan.
"""

from __future__ import annotations

import math

from devices.sizes import LEAST_SCORES, MOST_SCORES
from memory.estimate.precision import FLOAT16
from memory.estimate.workload import (
    COMPILER_BYTES,
    ExecutionPlan,
    Machine,
    Workload,
    adapted_by,
    trained_counts,
)
from memory.step_settings import StepSettings
from settings.declared import Config, TrainConfig
from settings.errors import UserError
from settings.fields import AUTO
from support.language import say
from support.units import format_size

SMALL_MACHINE_BYTES = 13 * 1000**3
SMALL_MACHINE_ROWS = 8
ROWS = 32
COMPILED_FROM_STEPS = 500  # To compile takes about a minute, and saves some 0.1 s a step.
LEAST_EVALUATION_ROWS = 2  # An evaluation batch on a small machine has so many; twice that elsewhere.
SCORES_SHARE = 256  # Bytes of the budget for each score: some 12 of them are in use at a time.


def make_work(config: Config, machine: Machine, source_tokens: int | None, target_tokens: int | None) -> Workload:
    """The work of one rank's share of a step; lengths that are None are the longest that the settings allow."""
    train = config.train
    data = config.data
    task = config.task
    source_tokens = source_tokens or data.max_seq_len
    if target_tokens is None:
        target_tokens = task.longest_target(data, source_tokens, config.model.num_decoder_layers > 0)
    return Workload(
        config.model,
        rows=math.ceil(effective_batch(train, machine) / machine.num_processes),
        source_tokens=source_tokens,
        target_tokens=target_tokens,
        dropout=config.model.dropout_rate > 0,
        optimizer=train.optimizer,
        hold_gradients=train.max_grad_norm > 0,
        sample_rows=train.sample_rows,
        answers=task.answers_per_row,
        trained=trained_counts(config.model, config.lora, train.freeze),
        adapted=adapted_by(config.model, config.lora),
    )


def effective_batch(train: TrainConfig, machine: Machine) -> int:
    """Rows of one step over all processes.

    The number given, else the product of both sizes given by hand times the processes. Left to auto it follows from the
    RAM of the machine alone, so that the same flags train the same model beside other programs and on several
    processes; it is raised to the least that keeps the one size given.
    """
    if train.effective_batch_size != AUTO:
        return int(train.effective_batch_size)
    sizes = [int(size) for size in (train.batch_size_per_gpu, train.gradient_accumulation_steps) if size != AUTO]
    least = machine.num_processes * math.prod(sizes)
    return least if len(sizes) == 2 else max(machine_rows(machine), least)


def machine_rows(machine: Machine) -> int:
    """Rows of a step by the RAM of the machine."""
    return SMALL_MACHINE_ROWS if machine.installed_bytes < SMALL_MACHINE_BYTES else ROWS


def micro_batches(settings: StepSettings, rows: int) -> list[int]:
    """Rows of a micro-batch that the settings allow, where a step has so many; the smallest first."""
    if settings.batch_size_per_gpu != AUTO:
        return [min(int(settings.batch_size_per_gpu), rows)]
    if settings.gradient_accumulation_steps != AUTO:
        return [math.ceil(rows / int(settings.gradient_accumulation_steps))]
    return sorted({math.ceil(rows / parts) for parts in range(1, rows + 1)})


def evaluation_batch(settings: StepSettings, machine: Machine, batch_size: int) -> int:
    """Rows of an evaluation batch beside training micro-batches of so many."""
    if settings.eval_batch_size_per_gpu != AUTO:
        return int(settings.eval_batch_size_per_gpu)
    is_small = machine.available_bytes < SMALL_MACHINE_BYTES
    return max(batch_size, LEAST_EVALUATION_ROWS if is_small else 2 * LEAST_EVALUATION_ROWS)


def scores_of(machine: Machine) -> int:
    """Scores of attention that a GPU forms at a time: a power of two, about 5% of the budget; 0 on a CPU."""
    if not machine.pads_attention:
        return 0
    most = max(1, machine.budget_bytes // SCORES_SHARE)
    return min(MOST_SCORES, max(LEAST_SCORES, 1 << most.bit_length() - 1))


def compiles_blocks(requested: bool | str, machine: Machine, work: Workload, plan: ExecutionPlan) -> bool:
    """Whether torch compiles the blocks of a plan: where it may and can, and left to auto where it pays."""
    if requested == AUTO:
        requested = machine.fuses_attention and is_long(work)
    return bool(requested) and not why_not_compiled(machine, work, plan)


def is_long(work: Workload) -> bool:
    """Whether a run has so many steps that compiling pays."""
    return work.steps is not None and work.steps >= COMPILED_FROM_STEPS


def why_not_compiled(machine: Machine, work: Workload, plan: ExecutionPlan) -> str:
    """Why torch cannot compile the blocks of a plan; empty where it can."""
    if machine.no_compiler:
        return machine.no_compiler
    if machine.has_own_memory and machine.host_bytes < COMPILER_BYTES:
        return say("the compiler takes {size} of RAM, which is not left", size=format_size(COMPILER_BYTES))
    if plan.kernels:
        return say("compiled kernels compute on this processor; with --compiled_kernels=False torch can compile")
    if work.adapted.targets:
        return say("blocks with adapters are not compiled")
    if plan.storage != plan.compute or plan.compute == FLOAT16:
        return say("only blocks of weights that are stored as they are computed with are compiled, and not in fp16")
    if plan.offloaded_blocks:
        return say("blocks with offloaded weights are not compiled")
    return ""


def kernels_of(requested: bool | str, machine: Machine) -> bool:
    """Whether compiled kernels compute; a fact of machine and settings, never of a stopwatch."""
    if requested is True and not machine.has_kernels:
        raise UserError(
            "--compiled_kernels = True, there are none here; allowed: auto or False, or a CPU with AVX2 under Linux "
            "and a C compiler (apt install gcc); `doctor` says what is missing"
        )
    return machine.has_kernels and requested is not False
