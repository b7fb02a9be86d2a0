"""What of an earlier plan stays, and what gives way to the settings and the machine of now."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from memory.estimate.shapes import Shapes
from memory.estimate.workload import ExecutionPlan, Machine, Workload
from memory.resumed_choice import choice_to_keep, precision_to_keep
from memory.step_settings import StepSettings
from memory.step_work import scores_of
from settings.declared import T5ModelConfig
from settings.errors import UserError
from settings.loading import load
from support.units import GIB, MIB

SETTINGS = StepSettings.of(load("train", {"train_file": "x"}))
WORK = Workload(T5ModelConfig(), 8, 64, 32, True, "adafactor")
EARLIER = ExecutionPlan(4, 2, 1, 3, 8, "bfloat16", "bfloat16", MIB)
CPU = Machine(GIB, 16 * GIB, has_kernels=True, no_compiler="")
GPU = replace(CPU, pads_attention=True, has_kernels=False)
ON_GPU = {"scores": 12345}


@pytest.mark.parametrize(
    ("earlier", "settings", "machine", "expected"),
    [
        ({}, {}, CPU, {}),
        ({"kernels": True}, {}, CPU, {}),
        ({"kernels": True}, {}, replace(CPU, has_kernels=False), {"kernels": False}),
        ({}, {"compiled_kernels": True}, CPU, {"kernels": True}),
        ({"kernels": True}, {"compiled_kernels": False}, CPU, {"kernels": False}),
        (ON_GPU, {}, CPU, {"kernels": True, "scores": 0}),
        (ON_GPU, {}, GPU, {}),
        ({}, {}, GPU, {"scores": scores_of(GPU)}),
        ({"compiled": True}, {}, GPU, {"scores": scores_of(GPU)}),
        ({"compiled": True}, {"compile": False}, CPU, {"compiled": False}),
        ({}, {"compile": True}, CPU, {"compiled": True}),
        ({"compiled": True}, {}, replace(CPU, no_compiler="no Triton"), {"compiled": False}),
        ({"compiled": True, "kernels": True}, {}, CPU, {"compiled": False}),
    ],
)
def test_kernels_scores_and_compiling_are_those_of_the_run_where_they_can_be(
    earlier: dict[str, Any], settings: dict[str, Any], machine: Machine, expected: dict[str, Any]
) -> None:
    plan = replace(EARLIER, **earlier)
    assert choice_to_keep(replace(SETTINGS, **settings), machine, WORK, plan, ()) == replace(plan, **expected)


@pytest.mark.parametrize(
    ("settings", "rows", "is_kept"),
    [
        ({}, 8, True),
        ({}, 5, True),
        ({}, 4, False),
        ({}, 9, False),
        ({"batch_size_per_gpu": 4}, 8, True),
        ({"batch_size_per_gpu": 2}, 8, False),
        ({"gradient_accumulation_steps": 2}, 8, True),
        ({"gradient_accumulation_steps": 1}, 8, False),
        ({"memory_mode": "low"}, 8, False),
        ({"eval_batch_size_per_gpu": 3}, 8, True),
    ],
)
def test_the_cut_stays_unless_another_one_is_asked_for(settings: dict[str, Any], rows: int, is_kept: bool) -> None:
    work = replace(WORK, rows=rows)
    choice = choice_to_keep(replace(SETTINGS, **settings), CPU, work, EARLIER, set(settings))
    kept = replace(EARLIER, eval_batch_size_per_gpu=settings.get("eval_batch_size_per_gpu", 8))
    assert choice == (kept if is_kept else None)
    bound = replace(work, shapes=Shapes.longest(rows, 64, 32, max_tokens=100))
    is_bound_kept = choice_to_keep(replace(SETTINGS, **settings), CPU, bound, EARLIER, set(settings)) is not None
    assert is_bound_kept == (is_kept or rows == 4), "tokens make more micro-batches than rows do"


def test_dtypes_stay_unless_others_are_asked_for() -> None:
    for words, lora_base, is_kept in (
        ("auto", None, True),
        ("bf16", None, True),
        ("no", None, False),
        ("no", "auto", True),
    ):
        precision = precision_to_keep(replace(SETTINGS, mixed_precision=words, lora_base=lora_base), CPU, EARLIER)
        assert precision == (EARLIER.precision if is_kept else None)
    in_fp16 = replace(EARLIER, compute="float16")
    with pytest.raises(UserError, match="computes in fp16"):
        precision_to_keep(SETTINGS, CPU, in_fp16)
    has_fp16 = replace(CPU, rates=(*CPU.rates, ("float16", 1.0)))
    assert precision_to_keep(SETTINGS, has_fp16, in_fp16) == in_fp16.precision
