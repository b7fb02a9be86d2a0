"""A resumed run keeps its choice, unless something else is asked for now."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from common.units import GIB, MIB
from memory.estimate.workload import ExecutionPlan, Machine
from memory.plan import Plan, plan
from settings.errors import UserError
from settings.loading import load

Rates = tuple[tuple[str, float], ...]


SLOW: Rates = (("float32", 1e11), ("bfloat16", 2e9))
FAST: Rates = (("float32", 1e11), ("bfloat16", 3e11))
MIXED = ("bfloat16", "float32")
WIDE = ("float32", "float32")


def on(rates: Rates, dtypes: tuple[str, str], budget: int = 8 * GIB, **flags: Any) -> Plan:
    earlier = ExecutionPlan(16, 1, 1, 3, 4, *dtypes, 32 * MIB, "fast")
    machine = Machine(budget, 8 * GIB, rates=rates)
    config = load("train", {"train_file": "x", "model_preset": "t5-small", "effective_batch_size": 16, **flags})
    return plan(config, machine, source_tokens=256, target_tokens=64, earlier=earlier)


@pytest.mark.parametrize(
    ("rates", "dtypes", "budget"),
    [
        (FAST, MIXED, 700 * MIB),
        (FAST, WIDE, 8 * GIB),
    ],
)
def test_a_run_computes_in_what_it_began_with_on_any_processor(
    rates: Rates, dtypes: tuple[str, str], budget: int
) -> None:
    chosen = on(rates, dtypes, budget)
    assert (chosen.choice.storage, chosen.choice.compute) == dtypes
    assert chosen.choice.batch_size_per_gpu == 16 or budget < GIB, "another cut is for who has less memory"
    assert "as the run did before" in " ".join(chosen.reasons)


def test_a_run_that_no_longer_fits_in_its_dtypes_says_what_it_goes_on_in() -> None:
    chosen = on(SLOW, WIDE, 520 * MIB, weights_in="device")
    assert (chosen.choice.storage, chosen.choice.compute) == MIXED
    assert "no longer fits here: it continues with bfloat16 storage" in " ".join(chosen.reasons)


GPU = Machine(
    8 * GIB,
    8 * GIB,
    rates=(("float32", 1e13), ("bfloat16", 4e13)),
    pads_attention=True,
    fuses_attention=True,
    no_compiler="",
)


def compiles(flag: str, machine: Machine = GPU, steps: int | None = 1000, **facts: Any) -> bool:
    flags = {"train_file": "x", "model_preset": "tiny", "mixed_precision": "bf16", "compile": flag}
    return plan(load("train", flags), machine, source_tokens=64, target_tokens=32, steps=steps, **facts).choice.compiled


def test_long_runs_compile_their_blocks_where_torch_can() -> None:
    assert compiles("auto") and compiles("True", steps=10)
    assert not compiles("auto", steps=499) and not compiles("auto", steps=None) and not compiles("False")
    without_triton = replace(GPU, no_compiler="Triton is missing")
    for machine in (
        without_triton,
        replace(GPU, has_own_memory=True, host_bytes=100 * MIB),
        replace(GPU, pads_attention=False, fuses_attention=False),
    ):
        assert not compiles("auto", machine)
    with pytest.raises(UserError, match="--compile = True, is not possible here: Triton is missing"):
        compiles("True", without_triton)
    with pytest.raises(UserError, match="compiled kernels compute"):
        compiles("True", Machine(8 * GIB, 8 * GIB, no_compiler="", has_kernels=True))


@pytest.mark.parametrize("began", [True, False])
def test_a_run_goes_on_compiled_or_not_as_it_began(began: bool) -> None:
    earlier = ExecutionPlan(32, 1, 1, 4, 4, "bfloat16", "bfloat16", 32 * MIB, scores=2**20, compiled=began)
    assert compiles("auto", steps=1000, earlier=earlier) is compiles("auto", steps=20, earlier=earlier) is began
    assert compiles("True", earlier=earlier) and not compiles("False", earlier=earlier)
