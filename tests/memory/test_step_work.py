"""How many rows a step has, how it may be cut, and what computes: by settings and machine alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from memory.estimate.blocks import Adapted
from memory.estimate.workload import COMPILER_BYTES, ExecutionPlan, Machine, Workload
from memory.step_settings import StepSettings
from memory.step_work import (
    compiles_blocks,
    effective_batch,
    evaluation_batch,
    kernels_of,
    make_work,
    micro_batches,
    scores_of,
    why_not_compiled,
)
from settings.declared import Config, T5ModelConfig, TrainConfig
from settings.errors import UserError
from settings.loading import load
from support.units import GIB, MIB

MACHINE = Machine(GIB, 16 * GIB, no_compiler="")
PLAN = ExecutionPlan(4, 1, 1, 0, 4, "bfloat16", "bfloat16", MIB)
WORK = Workload(T5ModelConfig(), 4, 64, 32, True, "adafactor", steps=500)


def config_of(**flags: Any) -> Config:
    return load("train", {"train_file": "x", **{name: str(value) for name, value in flags.items()}})


@pytest.mark.parametrize(
    ("train", "processes", "installed", "rows"),
    [
        ({"effective_batch_size": 5}, 2, 64, 5),
        ({}, 2, 13.0, 32),
        ({}, 2, 12.999, 8),
        ({}, 9, 12.999, 9),
        ({"batch_size_per_gpu": 6, "gradient_accumulation_steps": 2}, 3, 64, 36),
        ({"batch_size_per_gpu": 6}, 3, 64, 32),
        ({"gradient_accumulation_steps": 6}, 3, 12.0, 18),
    ],
)
def test_rows_of_a_step(train: dict[str, int], processes: int, installed: float, rows: int) -> None:
    machine = replace(MACHINE, num_processes=processes, installed_bytes=int(installed * 1000**3))
    assert effective_batch(replace(TrainConfig(), **train), machine) == rows  # type: ignore[arg-type]


def test_the_work_of_a_process() -> None:
    config = config_of(model_preset="tiny", effective_batch_size=7, max_grad_norm=0, max_seq_len=40, sample_rows=5)
    work = make_work(config, replace(MACHINE, num_processes=2), None, None)
    assert (work.rows, work.source_tokens, work.sample_rows, work.hold_gradients) == (4, 40, 5, False)
    assert work.dropout == (config.model.dropout_rate > 0) and 0 < work.target_tokens <= 40
    given = make_work(config_of(max_grad_norm=1, dropout_rate=0), MACHINE, 30, 0)
    assert (given.source_tokens, given.target_tokens, given.dropout, given.hold_gradients) == (30, 0, False, True)


@pytest.mark.parametrize(
    ("flags", "rows", "expected"),
    [
        ({}, 7, [1, 2, 3, 4, 7]),
        ({"batch_size_per_gpu": 5}, 7, [5]),
        ({"batch_size_per_gpu": 9}, 7, [7]),
        ({"gradient_accumulation_steps": 3}, 7, [3]),
    ],
)
def test_micro_batches_may_have_so_many_rows(flags: dict[str, int], rows: int, expected: list[int]) -> None:
    settings = StepSettings.of(config_of(**flags))
    assert micro_batches(settings, rows) == expected
    small = replace(MACHINE, available_bytes=13 * 1000**3 - 1)
    assert [evaluation_batch(settings, small, size) for size in (1, 3)] == [2, 3]
    large = replace(MACHINE, available_bytes=13 * 1000**3)
    assert [evaluation_batch(settings, large, size) for size in (3, 5)] == [4, 5]
    assert evaluation_batch(replace(settings, eval_batch_size_per_gpu=1), large, 5) == 1


def test_scores_of_a_gpu_are_a_power_of_two_of_its_budget() -> None:
    assert scores_of(MACHINE) == 0
    budgets = (0, 256 * 2**21 - 1, 256 * 2**21, 256 * 2**22 - 1, 2**60)
    sizes = [scores_of(replace(MACHINE, pads_attention=True, budget_bytes=budget)) for budget in budgets]
    assert sizes[1:4] == [2**20, 2**21, 2**21] and sizes[0] <= 2**20 and sizes[4] > 2**21


@pytest.mark.parametrize(
    ("machine", "work", "plan"),
    [
        ({"no_compiler": "no Triton"}, {}, {}),
        ({"has_own_memory": True, "host_bytes": COMPILER_BYTES - 1}, {}, {}),
        ({}, {}, {"kernels": True}),
        ({}, {"adapted": Adapted(("q",), drops=False)}, {}),
        ({}, {}, {"storage": "float32"}),
        ({}, {}, {"storage": "float16", "compute": "float16"}),
        ({}, {}, {"offloaded_blocks": 1}),
    ],
)
def test_what_stands_against_compiling(machine: dict[str, Any], work: dict[str, Any], plan: dict[str, Any]) -> None:
    where = replace(MACHINE, fuses_attention=True, **machine)
    assert why_not_compiled(where, replace(WORK, **work), replace(PLAN, **plan))
    for requested in (True, "auto"):
        assert not compiles_blocks(requested, where, replace(WORK, **work), replace(PLAN, **plan))


def test_blocks_are_compiled_where_it_pays_or_is_asked_for() -> None:
    gpu = replace(MACHINE, fuses_attention=True, has_own_memory=True, host_bytes=COMPILER_BYTES)
    assert compiles_blocks("auto", gpu, WORK, PLAN) and not compiles_blocks(False, gpu, WORK, PLAN)
    for machine, steps in ((MACHINE, 500), (gpu, 499), (gpu, None)):
        work = replace(WORK, steps=steps)
        assert compiles_blocks(True, machine, work, PLAN) and not compiles_blocks("auto", machine, work, PLAN)


def test_compiled_kernels_compute_where_they_are_and_may() -> None:
    for flag, where_they_are, elsewhere in (("auto", True, False), (False, False, False), (True, True, None)):
        assert kernels_of(flag, replace(MACHINE, has_kernels=True)) == where_they_are
        if elsewhere is not None:
            assert kernels_of(flag, MACHINE) == elsewhere
    with pytest.raises(UserError, match="compiled_kernels"):
        kernels_of(True, MACHINE)
