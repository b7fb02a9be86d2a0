"""Peaks and seconds that were compared with measurements: a formula of `memory/estimate/` changes on purpose alone.

Who changes one measures again (`python -m benchmarks.contract`, the slow tests beside this file) and writes the new
values here.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.units import GIB, MIB
from devices.processor import AVX512_BF16
from memory.estimate.peaks import peak_of, predict
from memory.estimate.time import predict_seconds
from memory.estimate.workload import FILE, ExecutionPlan, Machine, Workload, trained_counts
from settings.declared import T5ModelConfig
from settings.loading import load

SHAPE = {
    "vocab_size": 8192,
    "d_model": 256,
    "d_kv": 32,
    "d_ff": 1024,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 8,
}
RATES = (("float32", 1.5e11), ("bfloat16", 4e11), ("float16", 4e11))
CPU = Machine(GIB, GIB, 200 * MIB, RATES, speed_class=AVX512_BF16.name)
CUDA = Machine(
    4 * GIB,
    8 * GIB,
    0,
    RATES,
    pads_attention=True,
    fuses_attention=True,
    widens_whole=True,
    host_bytes=16 * GIB,
    speed_class="cuda",
)
LORA = {"train_file": "x", "is_finetune": True, "lora_rank": 4, **SHAPE}
EVEN = Workload(T5ModelConfig(**SHAPE), 8, 192, 64, True, "adafactor", sample_rows=2)
ADAPTED = load("train", {name: str(value) for name, value in LORA.items()})
ADAPTERS = replace(EVEN, trained=trained_counts(ADAPTED.model, ADAPTED.lora, freeze=None))
SAVING = ExecutionPlan(8, 1, 1, 5, 8, "float32", "float32", 8 * MIB)
CUT = replace(SAVING, batch_size_per_gpu=2, micro_batches_per_pass=4, saved_blocks=3)
ON_GPU = replace(CUT, storage="bfloat16", compute="bfloat16", scores=1 << 18)
# case -> work, choice, machine, MiB of the highest phase, milliseconds of a step
KEPT: dict[str, tuple[Workload, ExecutionPlan, Machine, float, float]] = {
    "saved": (EVEN, SAVING, CPU, 363.64, 470.896),
    "recomputed": (EVEN, replace(SAVING, saved_blocks=0, malloc="small"), CPU, 270.88, 722.685),
    "cut, compiled kernels": (EVEN, replace(CUT, kernels=True), CPU, 326.93, 584.430),
    "bfloat16 at rest": (EVEN, replace(CUT, storage="bfloat16"), CPU, 314.64, 599.563),
    "gradients held": (replace(EVEN, optimizer="adamw", hold_gradients=True), CUT, CPU, 383.24, 584.430),
    "adapters over int8": (ADAPTERS, replace(CUT, storage="int8"), CPU, 290.26, 428.360),
    "weights in a file": (
        EVEN,
        replace(SAVING, saved_blocks=0, weights_in=FILE, offloaded_blocks=3),
        CPU,
        298.12,
        581.333,
    ),
    "GPU": (EVEN, ON_GPU, CUDA, 63.66, 741.277),
}


@pytest.mark.parametrize("name", KEPT)
def test_a_prediction_stays(name: str) -> None:
    work, choice, machine, mebibytes, milliseconds = KEPT[name]
    source, target = work.step_shapes.sizes(choice.batch_size_per_gpu)
    choice = replace(choice, source_sizes=source, target_sizes=target)
    peak = peak_of(predict(work, choice, machine))[1] / MIB
    assert peak == pytest.approx(mebibytes, rel=1e-3)
    assert 1000 * predict_seconds(work, choice, machine) == pytest.approx(milliseconds, rel=1e-3)
