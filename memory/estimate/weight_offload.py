"""Memory and transfer time of blocks whose weights are offloaded.

The matrices of such a block are in a file, or in the RAM beside a device, and here only while the block works: in one of
a few slots, each as large as the largest block. A step brings each of them twice, and takes it back once where it learns,
however many rows pass through it, as long as one accumulation pass takes them all; that runs beside the computation.
Speeds of the disk are nominal where ways are compared, and measured (`devices.machine_file`) where times are told.
"""

from __future__ import annotations

import math

from memory.estimate.precision import INT4, dtype_bytes, matrix_bytes
from memory.estimate.workload import FILE, ExecutionPlan, Machine, Workload
from model.shapes import DECODER, ENCODER, Stack

SLOTS = 2  # one computes, one comes or goes
PIECE_ALIGNMENT = 4096  # bytes: of each matrix in a piece


def is_offloaded(block: int, num_blocks: int, offloaded_blocks: int) -> bool:
    """Whether a block, counted over both stacks, is offloaded: these are spread evenly, so that a copy has time."""
    return (block + 1) * offloaded_blocks // num_blocks > block * offloaded_blocks // num_blocks


def offloaded_in(work: Workload, choice: ExecutionPlan) -> dict[Stack, int]:
    """How many blocks of each stack are offloaded."""
    total = work.model.num_layers + work.model.num_decoder_layers
    encoder = work.model.num_layers * choice.offloaded_blocks // total
    return {ENCODER: encoder, DECODER: choice.offloaded_blocks - encoder}


def piece_bytes(work: Workload, choice: ExecutionPlan, stack: Stack) -> int:
    """The matrices of one block at rest, as they are offloaded."""
    sizes = (matrix_bytes(shape, choice.storage) for shape in work.block_matrices.get(stack, []))
    return sum(-(-size // PIECE_ALIGNMENT) * PIECE_ALIGNMENT for size in sizes)


def away_bytes(work: Workload, choice: ExecutionPlan) -> int:
    """Bytes of all offloaded weights."""
    return sum(count * piece_bytes(work, choice, stack) for stack, count in offloaded_in(work, choice).items())


def pinned_bytes(work: Workload, choice: ExecutionPlan) -> int:
    """What the host beside a GPU takes for offloaded weights: torch pins each piece in a power of two.

    In the RAM all of them are kept; to and from a file one at a time passes through a buffer.
    Source: torch 2.13, CachingHostAllocator.h.
    """
    blocks = {stack: count for stack, count in offloaded_in(work, choice).items() if count}
    if choice.weights_in == FILE:
        return max((_power_of_two(piece_bytes(work, choice, stack) + PIECE_ALIGNMENT) for stack in blocks), default=0)
    return sum(count * _power_of_two(piece_bytes(work, choice, stack)) for stack, count in blocks.items())


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def mapped_bytes(work: Workload, choice: ExecutionPlan, machine: Machine) -> int:
    """Frozen weights under adapters that a CPU reads from their file: no anonymous memory."""
    stored, count = work.mapped
    is_cpu = not machine.device and not machine.is_another and machine.base_bytes > 0  # another machine may be a Mac
    is_mapped = is_cpu and stored == choice.storage and not choice.offloaded_blocks
    return count * dtype_bytes(stored) if is_mapped else 0


def resident_bytes(work: Workload, choice: ExecutionPlan) -> int:
    """All weights of the model at rest that are not offloaded."""
    everywhere = work.counts["total"] * dtype_bytes(choice.storage) - away_bytes(work, choice)
    if choice.storage != INT4:
        return everywhere
    depths: dict[str, int] = {ENCODER: work.model.num_layers, DECODER: work.model.num_decoder_layers}
    shapes = [(depths[stack], shape) for stack, matrices in work.block_matrices.items() for shape in matrices]
    return everywhere - sum(depth * (math.prod(shape) - matrix_bytes(shape, INT4)) for depth, shape in shapes)


def slots_bytes(work: Workload, choice: ExecutionPlan, machine: Machine) -> int:
    """The slots where weights are while their block works; one more where updates come a block later."""
    if not choice.offloaded_blocks:
        return 0
    largest = max(piece_bytes(work, choice, stack) for stack, count in offloaded_in(work, choice).items() if count)
    return (SLOTS + (machine.num_processes > 1)) * largest


def taken_bytes(work: Workload, choice: ExecutionPlan) -> int:
    """What a step writes back: the blocks that are trained themselves, not by adapters."""
    if work.learning.adapters:
        return 0
    blocks = offloaded_in(work, choice)
    return sum(count * piece_bytes(work, choice, stack) for stack, count in blocks.items() if work.learns[stack])


def moving_seconds(work: Workload, choice: ExecutionPlan, machine: Machine, copy_rate: float) -> tuple[float, float]:
    """Seconds of copying: to the device for a pass through all blocks, and back for what is trained."""
    if not choice.offloaded_blocks:
        return 0.0, 0.0
    read, write = machine.disk_rates if choice.weights_in == FILE else (copy_rate, copy_rate)
    return away_bytes(work, choice) / read, taken_bytes(work, choice) / write
