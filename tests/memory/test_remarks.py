"""What is remarked on a plan: each sentence where it is true, and only there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from memory.estimate.precision import Precision
from memory.estimate.workload import ExecutionPlan, Machine, Workload
from memory.remarks import remarks_on
from memory.step_settings import StepSettings
from settings.declared import T5ModelConfig
from settings.fields import AUTO
from settings.loading import load
from support.units import GIB, MIB

SHAPE = T5ModelConfig(vocab_size=800, d_model=64, d_ff=128, d_kv=16, num_heads=4, num_layers=2, num_decoder_layers=1)
SETTINGS = StepSettings.of(load("train", {"train_file": "x", "effective_batch_size": "8", "optimizer": "adafactor"}))
WORK = Workload(SHAPE, 8, 64, 32, True, "adafactor", steps=500)
PLAN = ExecutionPlan(8, 1, 1, 3, 8, "bfloat16", "bfloat16", MIB)
FAST = (("float32", 1e11), ("bfloat16", 3e11))
MACHINE = Machine(GIB, GIB, rates=FAST, no_compiler="")
SLOW = {"rates": (("float32", 1e11), ("bfloat16", 1e10), ("float16", 3e11))}
FULL = {"storage": "float32", "compute": "float32"}
BEGAN = Precision.of("bfloat16", "bfloat16")
GPU = {"fuses_attention": True, "no_compiler": "no Triton"}
OPEN = {"is_optimizer_open": True}
ANY_ROWS = {"effective_batch_size": AUTO}


@pytest.mark.parametrize(
    ("settings", "plan", "machine", "others", "word"),
    [
        ({}, {}, {}, {}, ""),
        (ANY_ROWS, {}, {}, {"rows": 32}, "RAM"),
        (ANY_ROWS, {}, {}, {"rows": 33}, "the minimum"),
        ({**ANY_ROWS, "batch_size_per_gpu": 8}, {}, {}, {}, "RAM"),
        ({**ANY_ROWS, "batch_size_per_gpu": 8, "gradient_accumulation_steps": 1}, {}, {}, {}, ""),
        ({}, {"accumulation_passes": 2}, {}, {}, "2 passes"),
        ({"gradient_accumulation_steps": 3}, {"micro_batches_per_pass": 2}, {}, {}, "becomes 2 here: 16 rows"),
        (OPEN, {}, {}, {}, "optimizer=muon"),
        (OPEN, {}, {}, {"work": replace(WORK, rows=1, source_tokens=1, target_tokens=1)}, ""),
        (OPEN, {}, {}, {"work": replace(WORK, model=replace(SHAPE, vocab_size=10**6))}, ""),
        ({}, {"offloaded_blocks": 2, "weights_in": "ram"}, {}, {}, "2 of 3 blocks are offloaded to RAM"),
        ({}, {"offloaded_blocks": 1, "weights_in": "file"}, {}, {}, "1 of 3 blocks are offloaded to a file"),
        ({}, {}, {}, {"work": replace(WORK, mapped=("bfloat16", MIB))}, "2.0 MiB of frozen weights"),
        ({"mixed_precision": "fp16"}, {}, {}, {}, "using bfloat16 instead"),
        ({"mixed_precision": "fp16"}, {"compute": "float16"}, {"rates": (*FAST, ("float16", 3e11))}, {}, ""),
        ({}, FULL, {}, {"earlier_precision": BEGAN}, "continues with float32 storage"),
        ({}, {}, {}, {"earlier_precision": BEGAN}, ""),
        ({}, {}, SLOW, {"earlier_precision": BEGAN}, "as the run did before"),
        ({}, FULL, {}, {"earlier_precision": Precision.of("float32", "float32")}, "as the run did before"),
        ({}, {"compute": "float16"}, SLOW, {}, "loss scaling"),
        ({}, FULL, SLOW, {}, "bf16 is slow"),
        ({"mixed_precision": "no"}, FULL, SLOW, {}, ""),
        ({}, {}, {}, {"earlier": replace(PLAN, kernels=True)}, "compiled kernels, which are not available"),
        ({}, {"kernels": True}, {}, {"earlier": replace(PLAN, kernels=True)}, ""),
        ({}, {"compiled": True}, {}, {}, "about a minute"),
        ({}, {}, {}, {"earlier": replace(PLAN, compiled=True)}, "compile=False"),
        ({}, {}, {"no_compiler": "no Triton"}, {"earlier": replace(PLAN, compiled=True)}, "no Triton"),
        ({}, {}, GPU, {}, "not compiled: no Triton"),
        ({}, {}, {**GPU, "fuses_attention": False}, {}, ""),
        ({}, {}, {**GPU, "no_compiler": ""}, {}, ""),
        ({}, {}, GPU, {"work": replace(WORK, steps=499)}, ""),
        ({"compile": False}, {}, GPU, {}, ""),
        ({}, {}, {"no_kernels": "no gcc"}, {}, "without compiled kernels: no gcc"),
        ({}, {"kernels": True}, {"no_kernels": "no gcc"}, {}, ""),
        ({"compiled_kernels": False}, {}, {"no_kernels": "no gcc"}, {}, ""),
    ],
)
def test_each_remark_where_it_is_true(
    settings: dict[str, Any], plan: dict[str, Any], machine: dict[str, Any], others: dict[str, Any], word: str
) -> None:
    facts = {"work": WORK, "rows": 8, **others}
    remarks = list(
        remarks_on(
            replace(SETTINGS, **settings),
            facts.pop("work"),
            replace(PLAN, **plan),
            replace(MACHINE, **machine),
            **facts,
        )
    )
    assert len(remarks) == (word != "") and all(word in remark for remark in remarks)
