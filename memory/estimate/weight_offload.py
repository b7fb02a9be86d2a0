"""Bytes of stored weights, resident and offloaded, and the time that copies of offloaded ones take.

The matrices of an offloaded block are kept in a file or in a GPU's host RAM. They are in the memory of the computing
device only while the block runs, in one of a few slots, each as large as the largest block. Each accumulation pass
reads a block twice, for forward and for backward, and each step writes it back once if it is trained, however many rows
pass through it. The copies overlap the computation.
"""

from __future__ import annotations

from memory.estimate.precision import INT4, dtype_bytes, matrix_bytes
from memory.estimate.workload import FILE, ExecutionPlan, Machine, Workload
from model.shapes import DECODER, ENCODER, Stack

SLOTS = 2  # One block computes while the next one is read or the previous one is written back.
MATRIX_ALIGNMENT = 4096  # Each matrix of an offloaded block is padded to a multiple of this many bytes.


def is_offloaded(block: int, num_blocks: int, offloaded_blocks: int) -> bool:
    """Whether a block, numbered over both stacks, is offloaded.

    Offloaded blocks are spread evenly: the resident ones between them compute while the next one is copied.
    """
    return (block + 1) * offloaded_blocks // num_blocks > block * offloaded_blocks // num_blocks


def offloaded_block_counts(work: Workload, choice: ExecutionPlan) -> dict[Stack, int]:
    """How many blocks of each stack are offloaded; stacks without offloaded blocks are left out."""
    total = work.model.num_layers + work.model.num_decoder_layers
    encoder = work.model.num_layers * choice.offloaded_blocks // total  # `is_offloaded` spreads them so.
    counts: dict[Stack, int] = {ENCODER: encoder, DECODER: choice.offloaded_blocks - encoder}
    return {stack: count for stack, count in counts.items() if count}


def offloaded_block_bytes(work: Workload, choice: ExecutionPlan, stack: Stack) -> int:
    """Bytes of the matrices of one offloaded block, in the storage dtype."""
    sizes = (matrix_bytes(shape, choice.storage) for shape in work.block_matrices[stack])
    return sum(-(-size // MATRIX_ALIGNMENT) * MATRIX_ALIGNMENT for size in sizes)


def offloaded_bytes(work: Workload, choice: ExecutionPlan) -> int:
    """Bytes of all offloaded weights."""
    return sum(
        count * offloaded_block_bytes(work, choice, stack)
        for stack, count in offloaded_block_counts(work, choice).items()
    )


def pinned_bytes(work: Workload, choice: ExecutionPlan) -> int:
    """Pinned host RAM for the offloaded weights of a GPU: torch rounds each pinned buffer up to a power of two.

    If weights are kept in RAM, each block has a buffer; if they are kept in a file, all pass through a single one.
    Source: torch 2.13, CachingHostAllocator.h.
    """
    blocks = offloaded_block_counts(work, choice)
    if choice.weights_in == FILE:
        sizes = [offloaded_block_bytes(work, choice, stack) + MATRIX_ALIGNMENT for stack in blocks]
        return _power_of_two(max(sizes, default=1))
    return sum(count * _power_of_two(offloaded_block_bytes(work, choice, stack)) for stack, count in blocks.items())


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def mapped_bytes(work: Workload, choice: ExecutionPlan, machine: Machine) -> int:
    """Frozen base weights that a CPU run with adapters maps from the model's file: they take no anonymous memory."""
    # A GPU copies the weights, another machine may be a Mac, and offloaded weights have a file of their own.
    if machine.device or machine.is_another or not machine.base_bytes or choice.offloaded_blocks:
        return 0
    file_dtype, num_weights = work.mapped
    return num_weights * dtype_bytes(file_dtype) if file_dtype == choice.storage else 0


def resident_bytes(work: Workload, choice: ExecutionPlan) -> int:
    """Bytes of all weights that are not offloaded, in the storage dtype."""
    total = work.counts["total"] * dtype_bytes(choice.storage) - offloaded_bytes(work, choice)
    if choice.storage == INT4:  # Only matrices of blocks are packed in int4; embedding and head stay in int8.
        for stack, matrices in work.block_matrices.items():
            depth = work.model.num_decoder_layers if stack == DECODER else work.model.num_layers
            total -= depth * sum(rows * columns - matrix_bytes((rows, columns), INT4) for rows, columns in matrices)
    return total


def slots_bytes(work: Workload, choice: ExecutionPlan, machine: Machine) -> int:
    """Bytes of the slots that hold offloaded blocks while they run.

    With several processes a block is updated only while the next one runs backward, which takes one more slot.
    """
    largest = max(
        (offloaded_block_bytes(work, choice, stack) for stack in offloaded_block_counts(work, choice)), default=0
    )
    return (SLOTS + (machine.num_processes > 1)) * largest


def written_back_bytes(work: Workload, choice: ExecutionPlan) -> int:
    """Bytes of offloaded weights that a step writes back: those of trained blocks, and none if adapters are trained."""
    if work.learning.adapters:
        return 0
    blocks = offloaded_block_counts(work, choice)
    return sum(
        count * offloaded_block_bytes(work, choice, stack) for stack, count in blocks.items() if work.learns[stack]
    )


def transfer_seconds(work: Workload, choice: ExecutionPlan, machine: Machine, copy_rate: float) -> tuple[float, float]:
    """Seconds to read all offloaded blocks once, and to write the trained ones back.

    Args:
        copy_rate: bytes a second between device and RAM, used if weights are kept in RAM; the disk's rates are used
            for a file.
    """
    read, write = machine.disk_rates if choice.weights_in == FILE else (copy_rate, copy_rate)
    return offloaded_bytes(work, choice) / read, written_back_bytes(work, choice) / write
