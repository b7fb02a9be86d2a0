"""How long does one way to run a step take? Products at the measured rate, updates, and the wire between processes."""

from __future__ import annotations

from config import T5ModelConfig
from memory.moments import offloaded_bytes
from memory.sharing import communication_seconds
from memory.work import Choice, Machine, Work, dtype_bytes, inner_width, weight_counts

MALLOC_SPEED = {"small": 0.73, "fast": 1.0}  # small returns every freed tensor to the system, which zeroes it again
HALF_TOKENS, HALF_TOKENS_ON_GPU = 64, 1024  # of a micro-batch at which products reach half of their speed
WIDE = 512  # d_model from which on products are so large that fewer tokens do
# Passes over all weights, four bytes each: of an update; of each further walk, which reads and adds to all gradients as
# part of the products; and where storage and products differ, of rounding, and of the casts of a walk.
UPDATE_PASSES, WALK_PASSES, ROUNDING_PASSES, CAST_PASSES = 6, 2, 3, 12
MEMORY_RATE = 8e9  # bytes a second
COPY_RATE = 10e9  # bytes a second between device and host, which hide behind the computation


def step_flops(c: T5ModelConfig, rows: int, source: int, target: int) -> tuple[float, float]:
    """FLOP of one forward over the blocks, and of the head."""
    counts, inner = weight_counts(c), inner_width(c)
    encoder = c.num_layers * (2 * counts["encoder"] * source + 4 * inner * source**2)
    cross = 2 * (2 * c.d_model * inner) * (source - target)  # keys and values are made of the source
    decoder = c.num_decoder_layers * (
        2 * counts["decoder"] * target + cross + 2 * inner * target**2 + 4 * inner * source * target
    )
    return float(rows * (encoder + decoder)), float(rows * 2 * counts["embedding"] * target)


def _again_flops(c: T5ModelConfig, rows: int, source: int, target: int) -> float:
    """FLOP of running all blocks once more for backward: a forward without the product behind feed-forward."""
    blocks, _ = step_flops(c, rows, source, target)
    return blocks - rows * 2 * c.d_ff * c.d_model * (c.num_layers * source + c.num_decoder_layers * target)


def predict_seconds(work: Work, choice: Choice, machine: Machine) -> float:
    """Predict how long a step takes: products at the measured rate, half of it lost to everything else, and updates."""
    blocks, head = step_flops(work.model, work.rows, work.source_tokens, work.target_tokens)
    total_blocks = work.model.num_layers + work.model.num_decoder_layers
    recompute = 1.0 - choice.kept_blocks / total_blocks
    step = work.step_shapes.step
    tokens = choice.batch_size_per_gpu * (step.source + step.target) / work.rows
    half = HALF_TOKENS_ON_GPU if machine.pads_attention else HALF_TOKENS * min(1.0, WIDE / work.model.d_model) ** 2
    efficiency = MALLOC_SPEED[choice.malloc] * 0.5 * tokens / (tokens + half)
    count = work.counts["total"]
    passes = UPDATE_PASSES + WALK_PASSES * (choice.num_walks - 1)
    if choice.storage != choice.compute:
        passes += ROUNDING_PASSES + CAST_PASSES * choice.num_walks
    exchange = communication_seconds(
        count, machine.num_processes, choice.shards, dtype_bytes(choice.storage), dtype_bytes(choice.compute)
    )
    again = recompute * _again_flops(work.model, work.rows, work.source_tokens, work.target_tokens)
    computing = (3.0 * (blocks + head) + again) / (machine.rate(choice.compute) * efficiency)
    copying = 2 * offloaded_bytes(work, choice, machine) / COPY_RATE
    return max(computing + 0.05 * copying, copying) + 4 * count * passes / choice.shards / MEMORY_RATE + exchange
