"""A resumed run keeps its choice, unless something else is asked for now."""

from __future__ import annotations

from typing import Any

import pytest

from memory.estimate.workload import ExecutionPlan, Machine
from memory.plan import Plan, plan
from settings.errors import UserError
from settings.loading import load
from support.units import GIB, MIB

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


def test_compiling_that_is_asked_for_and_not_possible_is_refused() -> None:
    config = load("train", {"train_file": "x", "model_preset": "tiny", "compile": "True"})
    with pytest.raises(UserError, match="--compile = True, is not possible here: no Triton"):
        plan(config, Machine(8 * GIB, 8 * GIB, no_compiler="no Triton"))
