"""Weights at rest, and the blocks of which they are offloaded: how many bytes, where, and how long moving them takes.

The matrices of an offloaded block are in a file, or in the RAM beside a device, and here only while the block works: in
one of a few slots, each as large as the largest block. A step brings each of them twice, and takes it back once where
it is trained, however many rows pass through it, as long as one accumulation pass takes them all; that runs beside the
computation.
"""

from __future__ import annotations

from memory.estimate.precision import INT4, dtype_bytes, matrix_bytes
from memory.estimate.workload import FILE, ExecutionPlan, Machine, Workload
from model.shapes import DECODER, ENCODER, Stack

SLOTS = 2  # One block computes while the next one comes, or the last one goes.
PIECE_ALIGNMENT = 4096  # Bytes, of each matrix in a piece.


def is_offloaded(block: int, num_blocks: int, offloaded_blocks: int) -> bool:
    """Whether a block, counted over both stacks, is offloaded: these are spread evenly, so that a copy has time."""
    return (block + 1) * offloaded_blocks // num_blocks > block * offloaded_blocks // num_blocks


def offloaded_in(work: Workload, choice: ExecutionPlan) -> dict[Stack, int]:
    """How many blocks of each stack are offloaded; only stacks that have such blocks."""
    total = work.model.num_layers + work.model.num_decoder_layers
    encoder = work.model.num_layers * choice.offloaded_blocks // total
    counts: dict[Stack, int] = {ENCODER: encoder, DECODER: choice.offloaded_blocks - encoder}
    return {stack: count for stack, count in counts.items() if count}


def piece_bytes(work: Workload, choice: ExecutionPlan, stack: Stack) -> int:
    """The matrices of one block at rest, as they are offloaded."""
    sizes = (matrix_bytes(shape, choice.storage) for shape in work.block_matrices[stack])
    return sum(-(-size // PIECE_ALIGNMENT) * PIECE_ALIGNMENT for size in sizes)


def offloaded_bytes(work: Workload, choice: ExecutionPlan) -> int:
    """Bytes of all offloaded weights."""
    return sum(count * piece_bytes(work, choice, stack) for stack, count in offloaded_in(work, choice).items())


def pinned_bytes(work: Workload, choice: ExecutionPlan) -> int:
    """What the host beside a GPU takes for offloaded weights: torch pins each piece in a power of two.

    In the RAM all of them are kept; to and from a file one at a time passes through a buffer.
    Source: torch 2.13, CachingHostAllocator.h.
    """
    blocks = offloaded_in(work, choice)
    if choice.weights_in == FILE:
        sizes = [piece_bytes(work, choice, stack) + PIECE_ALIGNMENT for stack in blocks]
        return _power_of_two(max(sizes, default=1))
    return sum(count * _power_of_two(piece_bytes(work, choice, stack)) for stack, count in blocks.items())


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def mapped_bytes(work: Workload, choice: ExecutionPlan, machine: Machine) -> int:
    """Frozen weights under adapters that a CPU reads from their file: no anonymous memory."""
    dtype, count = work.mapped
    if machine.device or machine.is_another or not machine.base_bytes or choice.offloaded_blocks:
        return 0  # A GPU copies them, another machine may be a Mac, and offloaded weights have a file of their own.
    return count * dtype_bytes(dtype) if dtype == choice.storage else 0


def resident_bytes(work: Workload, choice: ExecutionPlan) -> int:
    """All weights of the model at rest that are not offloaded."""
    total = work.counts["total"] * dtype_bytes(choice.storage) - offloaded_bytes(work, choice)
    if choice.storage == INT4:  # Only matrices of blocks are packed in int4; tables stay in int8.
        for stack, matrices in work.block_matrices.items():
            depth = work.model.num_decoder_layers if stack == DECODER else work.model.num_layers
            total -= depth * sum(rows * columns - matrix_bytes((rows, columns), INT4) for rows, columns in matrices)
    return total


def slots_bytes(work: Workload, choice: ExecutionPlan, machine: Machine) -> int:
    """The slots where weights are while their block works; one more where updates come a block later."""
    largest = max((piece_bytes(work, choice, stack) for stack in offloaded_in(work, choice)), default=0)
    return (SLOTS + (machine.num_processes > 1)) * largest


def written_back_bytes(work: Workload, choice: ExecutionPlan) -> int:
    """What a step writes back: the blocks that are trained themselves, not by adapters."""
    if work.learning.adapters:
        return 0
    blocks = offloaded_in(work, choice)
    return sum(count * piece_bytes(work, choice, stack) for stack, count in blocks.items() if work.learns[stack])


def moving_seconds(work: Workload, choice: ExecutionPlan, machine: Machine, copy_rate: float) -> tuple[float, float]:
    """Seconds of copying: to the device for a pass through all blocks, and back for what is trained."""
    read, write = machine.disk_rates if choice.weights_in == FILE else (copy_rate, copy_rate)
    return offloaded_bytes(work, choice) / read, written_back_bytes(work, choice) / write
