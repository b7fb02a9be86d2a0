"""The order of the ways to run is the measured one: what is faster is predicted to be faster, by about as much."""

from __future__ import annotations

from dataclasses import replace

import pytest

from config import T5ModelConfig
from memory.estimate.time import predict_seconds
from memory.estimate.workload import ExecutionPlan, Machine, Workload
from units import GIB, MIB

SHAPE = T5ModelConfig(vocab_size=8000, d_model=512, d_ff=2048, d_kv=64, num_heads=8, num_layers=4, num_decoder_layers=4)
WORK = Workload(SHAPE, 8, 128, 64, False, "adafactor")
KEPT = ExecutionPlan(8, 1, 1, 8, 2, "float32", "float32", 32 * MIB, "fast")
MACHINE = Machine(GIB, GIB, rates=(("float32", 9e10), ("bfloat16", 1e9)))


# processor time of a step over that of KEPT, one thread of a CPU with AVX2, 8 rows of 128 + 64 tokens
@pytest.mark.parametrize(
    ("way", "measured"),
    [
        (replace(KEPT, saved_blocks=0), 1.16),
        (replace(KEPT, batch_size_per_gpu=1, micro_batches_per_pass=8), 1.32),
        (replace(KEPT, malloc="small"), 1.34),
        (replace(KEPT, batch_size_per_gpu=1, accumulation_passes=8, storage="bfloat16"), 1.74),
    ],
)
def test_slower_ways_are_predicted_slower(way: ExecutionPlan, measured: float) -> None:
    predicted = predict_seconds(WORK, way, MACHINE) / predict_seconds(WORK, KEPT, MACHINE)
    assert predicted == pytest.approx(measured, rel=0.1)


LARGE = T5ModelConfig(
    vocab_size=8000, d_model=768, d_ff=3072, d_kv=64, num_heads=12, num_layers=12, num_decoder_layers=12
)
ALL_KEPT = replace(KEPT, saved_blocks=24)
ROW_BY_ROW = replace(ALL_KEPT, batch_size_per_gpu=1)


# the same of 200M weights, where narrow weights are widened at every walk
@pytest.mark.parametrize(
    ("way", "measured"),
    [
        (replace(ALL_KEPT, saved_blocks=0), 1.30),
        (replace(ROW_BY_ROW, accumulation_passes=8, storage="bfloat16"), 1.87),
        (replace(KEPT, saved_blocks=0, batch_size_per_gpu=2, micro_batches_per_pass=4, storage="bfloat16"), 1.55),
    ],
)
def test_slower_ways_of_a_large_model_too(way: ExecutionPlan, measured: float) -> None:
    work = replace(WORK, model=LARGE)
    predicted = predict_seconds(work, way, MACHINE) / predict_seconds(work, ALL_KEPT, MACHINE)
    assert predicted == pytest.approx(measured, rel=0.15)
