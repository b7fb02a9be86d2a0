"""Bytes and seconds that were compared with measurements: a formula of `memory/estimate/` changes on purpose alone.

Who changes one measures again (`python -m benchmarks.contract`, the slow tests beside this file) and writes the new
values here, which `python -m tests.memory.estimate.test_kept_predictions` prints.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from devices.processor import AMX_BF16, AVX512_BF16
from memory.estimate.blocks import NO_ADAPTERS
from memory.estimate.peaks import peak_of, predict
from memory.estimate.shapes import Shapes
from memory.estimate.time import RemainingWork, predict_seconds, predict_times
from memory.estimate.workload import FILE, RAM, ExecutionPlan, Machine, Workload, adapted_by, trained_counts
from settings.declared import T5ModelConfig
from settings.loading import load
from support.units import GIB, MIB

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
AMX = replace(CPU, speed_class=AMX_BF16.name, measured=(("float32", 2e11),), num_processes=2, correction=1.25)
SLOW_DISK = replace(CPU, disk_rates=(8e7, 3e7))
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
# Four steps of eight rows, the last one with five.
LENGTHS = np.random.default_rng(8).integers(20, 400, (2, 4, 8)) * (np.arange(32).reshape(4, 8) < 29)
MIXED = replace(EVEN, shapes=Shapes(LENGTHS[0], LENGTHS[1] // 4, is_complete=False))
BOUND = replace(EVEN, shapes=Shapes(LENGTHS[0], LENGTHS[1] // 4, max_tokens=900))
LONG = Workload(EVEN.model, 2, 1200, 700, True, "adamw_8bit", evaluation=Shapes.longest(16, 100, 30))
UNTIED = T5ModelConfig(**SHAPE, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
LABELS = T5ModelConfig(**{**SHAPE, "num_decoder_layers": 0}, head="token", labels="5")
POOLED = T5ModelConfig(**SHAPE, head="sequence", labels="3")


def adapted(work: Workload, **flags: object) -> Workload:
    """The same with adapters of rank 4."""
    config = load("train", {name: str(value) for name, value in {**LORA, **flags}.items()})
    trained = trained_counts(config.model, config.lora, freeze=None)
    return replace(work, model=config.model, trained=trained, adapted=adapted_by(config.model, config.lora))


WITH_TOKENS = adapted(EVEN, lora_tokens="0-9", lora_dropout=0.1, tie_word_embeddings=False)
SAVING = ExecutionPlan(8, 1, 1, 5, 8, "float32", "float32", 8 * MIB)
NONE_SAVED = replace(SAVING, saved_blocks=0)
CUT = replace(SAVING, batch_size_per_gpu=2, micro_batches_per_pass=4, saved_blocks=3)
PASSES = replace(CUT, micro_batches_per_pass=2, accumulation_passes=2)
KERNELS = replace(CUT, kernels=True)
NARROW = replace(CUT, storage="bfloat16")
ON_GPU = replace(NARROW, compute="bfloat16", scores=1 << 18)
CASES: dict[str, tuple[Workload, ExecutionPlan, Machine]] = {
    "saved": (EVEN, SAVING, CPU),
    "recomputed": (EVEN, replace(NONE_SAVED, malloc="small"), CPU),
    "cut, compiled kernels": (EVEN, KERNELS, CPU),
    "bfloat16 at rest": (EVEN, NARROW, CPU),
    "gradients held": (replace(EVEN, optimizer="adamw", hold_gradients=True), CUT, CPU),
    "adapters over int8": (replace(adapted(EVEN), adapted=NO_ADAPTERS), replace(CUT, storage="int8"), CPU),
    "weights in a file": (EVEN, replace(NONE_SAVED, weights_in=FILE, offloaded_blocks=3), CPU),
    "weights on a slow disk": (EVEN, replace(PASSES, weights_in=FILE, offloaded_blocks=3), SLOW_DISK),
    "GPU": (EVEN, ON_GPU, CUDA),
    "heap not trimmed": (EVEN, replace(CUT, malloc="untrimmed"), CPU),
    "several passes": (MIXED, PASSES, CPU),
    "several passes, compiled kernels": (MIXED, replace(PASSES, kernels=True), CPU),
    "bounded tokens": (BOUND, replace(KERNELS, saved_blocks=1), CPU),
    "gated": (replace(MIXED, model=UNTIED, optimizer="muon"), replace(CUT, saved_blocks=1), CPU),
    "gated, compiled kernels": (replace(MIXED, model=UNTIED, dropout=False), replace(KERNELS, saved_blocks=1), CPU),
    "wide": (replace(EVEN, model=T5ModelConfig(**{**SHAPE, "d_model": 1024})), SAVING, CPU),
    "two processes in bfloat16": (EVEN, replace(NARROW, compute="bfloat16", hold_gradients=True), AMX),
    "several answers": (replace(MIXED, answers=2), CUT, CPU),
    "several answers, compiled kernels": (replace(MIXED, answers=2), KERNELS, CPU),
    "long rows": (replace(LONG, dropout=False), replace(SAVING, batch_size_per_gpu=1, micro_batches_per_pass=2), CPU),
    "rows of 128, compiled kernels": (replace(EVEN, source_tokens=128), KERNELS, CPU),
    "long evaluation, compiled kernels": (replace(EVEN, evaluation=Shapes.longest(1, 3000, 2000)), KERNELS, CPU),
    "six answers": (replace(MIXED, answers=6), CUT, CPU),
    "long rows, compiled kernels": (LONG, replace(KERNELS, batch_size_per_gpu=1, saved_blocks=5), CPU),
    "labels of tokens": (replace(EVEN, model=LABELS, target_tokens=0), replace(SAVING, saved_blocks=3), CPU),
    "labels of rows": (replace(EVEN, model=POOLED), replace(NARROW, compute="bfloat16"), AMX),
    "dropping adapters": (adapted(MIXED, lora_dropout=0.1, lora_targets="q,v,wo"), KERNELS, CPU),
    "adapters beside a head": (adapted(EVEN, head="sequence", labels="3"), replace(PASSES, storage="int8"), CPU),
    "adapters and tokens over int4": (WITH_TOKENS, replace(PASSES, storage="int4"), CPU),
    "adapters over int4 on a GPU": (adapted(EVEN), replace(ON_GPU, storage="int4"), CUDA),
    "mapped base": (replace(adapted(EVEN), mapped=("bfloat16", 1_000_000)), NARROW, CPU),
    "GPU, fp16": (MIXED, replace(ON_GPU, compute="float16"), CUDA),
    "GPU, compiled": (
        replace(MIXED, model=UNTIED, answers=2),
        replace(ON_GPU, compiled=True),
        replace(CUDA, base_bytes=MIB),
    ),
    "CPU, compiled": (EVEN, replace(CUT, compiled=True), CPU),
    "GPU, muon in fp32": (replace(EVEN, optimizer="muon"), replace(CUT, scores=8 * 192**2, hold_gradients=True), CUDA),
    "GPU, weights in RAM": (EVEN, replace(ON_GPU, weights_in=RAM, offloaded_blocks=4), replace(CUDA, num_processes=2)),
    "GPU, answers in one tile": (replace(LONG, answers=3), replace(ON_GPU, scores=1 << 28, saved_blocks=0), CUDA),
}
# case -> bytes of the highest phase, and of all phases together; milliseconds of a step, seconds of a run.
KEPT: dict[str, tuple[int, int, float, float]] = {
    "saved": (381313461, 2827102344, 470.8957, 81.6287),
    "recomputed": (284055759, 2356521128, 722.6854, 120.6062),
    "cut, compiled kernels": (342818270, 2662704735, 584.4302, 99.4201),
    "bfloat16 at rest": (329935357, 2608709216, 599.5634, 101.6548),
    "gradients held": (401872081, 3188517378, 584.4302, 100.4662),
    "adapters over int8": (304374786, 2463461580, 428.3601, 75.8044),
    "weights in a file": (312613557, 2551764636, 581.3328, 103.8888),
    "weights on a slow disk": (316453475, 2590458260, 961.1947, 267.3576),
    "GPU": (66751802, 442449110, 741.2767, 166.6835),
    "heap not trimmed": (333020608, 2776503744, 535.5959, 91.3624),
    "several passes": (362456755, 2864058390, 522.7733, 89.2467),
    "several passes, compiled kernels": (355054627, 2770213621, 522.7733, 89.2467),
    "bounded tokens": (315598504, 2542052415, 568.7894, 95.9413),
    "gated": (390558540, 3092517746, 874.8386, 146.6057),
    "gated, compiled kernels": (355104834, 2808219588, 681.2539, 114.7419),
    "wide": (614993384, 4173833455, 1404.4984, 241.7314),
    "two processes in bfloat16": (335807423, 2797357277, 351.744, 55.0255),
    "several answers": (456783692, 3156131945, 520.2511, 88.8306),
    "several answers, compiled kernels": (403517834, 2912730093, 520.2511, 88.8306),
    "long rows": (491724476, 3361913116, 1507.0002, 309.1775),
    "rows of 128, compiled kernels": (322668080, 2555135420, 461.2862, 79.1013),
    "long evaluation, compiled kernels": (396295078, 2802153383, 584.4302, 99.4201),
    "six answers": (658048680, 3780696577, 520.2511, 88.8306),
    "long rows, compiled kernels": (515646058, 3457101932, 1528.2002, 313.4811),
    "labels of tokens": (317922539, 2000520480, 295.0085, 50.0784),
    "labels of rows": (330683588, 2469371456, 313.5572, 49.4382),
    "dropping adapters": (384089616, 2825507996, 378.2872, 67.2209),
    "adapters beside a head": (272733111, 2080496497, 386.5181, 68.6076),
    "adapters and tokens over int4": (280109957, 2382966520, 438.6447, 77.5985),
    "adapters over int4 on a GPU": (51409016, 346324924, 543.6921, 127.3675),
    "mapped base": (304443747, 2486757698, 437.1877, 77.3157),
    "GPU, fp16": (111791910, 666788447, 674.4104, 151.9729),
    "GPU, compiled": (670027274, 5582946490, 810.1499, 182.1017),
    "CPU, compiled": (863478197, 7452383634, 584.4302, 99.4201),
    "GPU, muon in fp32": (133580331, 880691228, 2515.1633, 557.6629),
    "GPU, weights in RAM": (67822901, 438840902, 742.5883, 166.972),
    "GPU, answers in one tile": (711181393, 3516202021, 981.5383, 252.2882),
}


def predictions(name: str) -> tuple[int, int, float, float]:
    """What is predicted of a case."""
    work, choice, machine = CASES[name]
    source, target = work.step_shapes.sizes(choice.batch_size_per_gpu)
    choice = replace(choice, source_sizes=source, target_sizes=target)
    phases = predict(work, choice, machine)
    run = predict_times(work, choice, machine, RemainingWork(100, 4, 192, 10, answer_tokens=500, beams=4))
    return (
        peak_of(phases)[1],
        sum(sum(parts.values()) for parts in phases.values()),
        round(1000 * predict_seconds(work, choice, machine), 4),
        round(run.high, 4),
    )


@pytest.mark.parametrize("name", CASES)
def test_a_prediction_stays(name: str) -> None:
    assert predictions(name) == pytest.approx(KEPT[name], rel=1e-9, abs=1e-3), "bytes are exact"


if __name__ == "__main__":
    for name in CASES:
        print(f'    "{name}": {predictions(name)},')
