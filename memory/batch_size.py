"""Batch sizes: the rows of a step, and which micro-batches they may be cut into; `memory.plan` takes the fastest that fits."""

from __future__ import annotations

import math

from memory.estimate.workload import Machine
from settings.declared import Config
from settings.fields import AUTO

SMALL_MACHINE_BYTES = 13 * 1000**3
SMALL_MACHINE_ROWS = 8
ROWS = 32


def table_guess(available_bytes: int) -> tuple[int, int, int]:
    """The old table's first guess: micro-batch, evaluation batch, accumulation."""
    return (1, 2, 8) if available_bytes < SMALL_MACHINE_BYTES else (2, 4, 16)


def effective_batch(config: Config, machine: Machine) -> int:
    """Rows of one step over all processes.

    The number given, else the product of both sizes given by hand times the processes. Left to auto it follows from the RAM
    of the machine alone, so that the same flags train the same model beside other programs and on several processes; it is
    raised to the least that keeps the one size given.
    """
    train = config.train
    if train.effective_batch_size != AUTO:
        return int(train.effective_batch_size)
    if AUTO not in (train.batch_size_per_gpu, train.gradient_accumulation_steps):
        return int(train.batch_size_per_gpu) * int(train.gradient_accumulation_steps) * machine.num_processes
    return max(machine_rows(machine), least_rows(config, machine))


def machine_rows(machine: Machine) -> int:
    """Rows of a step by the RAM of the machine."""
    return SMALL_MACHINE_ROWS if machine.installed_bytes < SMALL_MACHINE_BYTES else ROWS


def least_rows(config: Config, machine: Machine) -> int:
    """The fewest rows of a step in which each process has a row, and the one size given is kept."""
    sizes = (config.train.batch_size_per_gpu, config.train.gradient_accumulation_steps)
    return machine.num_processes * max((int(size) for size in sizes if size != AUTO), default=1)


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
