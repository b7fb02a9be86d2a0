"""Batch sizes: the rows of a step, and which micro-batches they may be cut into; `memory.plan` takes the fastest that fits."""

from __future__ import annotations

import math

from memory.estimate.workload import Machine
from settings.declared import Config
from settings.fields import AUTO

TABLE_THRESHOLD_BYTES = 13 * 1000**3  # the old table: below 13 GB available 1 / 2 / 8, else 2 / 4 / 16


def table_guess(available_bytes: int) -> tuple[int, int, int]:
    """The old table's first guess: micro-batch, evaluation batch, accumulation."""
    return (1, 2, 8) if available_bytes < TABLE_THRESHOLD_BYTES else (2, 4, 16)


def effective_batch(config: Config, machine: Machine) -> int:
    """Rows of one step: as given, else what micro-batch and accumulation give, else the old table's."""
    train, (batch_size, _, accumulation) = config.train, table_guess(machine.available_bytes)
    if train.effective_batch_size != AUTO:
        return int(train.effective_batch_size)
    if train.batch_size_per_gpu != AUTO or train.gradient_accumulation_steps != AUTO:
        if train.batch_size_per_gpu != AUTO:
            batch_size = int(train.batch_size_per_gpu)
        if train.gradient_accumulation_steps != AUTO:
            accumulation = int(train.gradient_accumulation_steps)
        return batch_size * accumulation * machine.num_processes
    return batch_size * accumulation


def micro_batches(config: Config, rows: int) -> list[int]:
    """Rows of a micro-batch that the settings allow, where a step has so many."""
    train = config.train
    if train.batch_size_per_gpu != AUTO:
        return [min(int(train.batch_size_per_gpu), rows)]
    if train.gradient_accumulation_steps != AUTO:
        return [math.ceil(rows / int(train.gradient_accumulation_steps))]
    return sorted({math.ceil(rows / parts) for parts in range(1, rows + 1)})


def evaluation_batch(config: Config, machine: Machine, batch_size: int) -> int:
    """Rows of an evaluation batch beside training micro-batches of so many."""
    given = config.train.eval_batch_size_per_gpu
    return max(batch_size, table_guess(machine.available_bytes)[1]) if given == AUTO else int(given)
