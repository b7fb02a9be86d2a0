"""A refusal names phase, batch and sizes, and what it says would fit does fit."""

from __future__ import annotations

import re
from typing import Any

import pytest

from config import Config, DoesNotFit, UserError, load
from devices import processor
from memory.estimate.workload import Machine
from memory.machines import DTYPES
from memory.plan import plan
from units import GIB, MIB, parse_size

pytestmark = pytest.mark.usefixtures("processor_class")


def settings_of(**flags: Any) -> Config:
    return load("train", {"train_file": "x", **{name: str(value) for name, value in flags.items()}})


def machine(budget: int) -> Machine:
    return Machine(budget, 16 * GIB, 170 * MIB, tuple((dtype, processor.here().rate(dtype, 2)) for dtype in DTYPES))


CASES: list[tuple[dict[str, Any], int]] = [
    ({"model_preset": "t5-base", "optimizer": "adamw", "mixed_precision": "no"}, 2 * GIB),
    ({"model_preset": "t5-small", "max_seq_len": 2048, "batch_size_per_gpu": 16, "effective_batch_size": 32, "objective": "pairs"}, GIB),
]  # fmt: skip


def test_kernels_that_are_asked_for_and_not_there_are_refused() -> None:
    with pytest.raises(UserError, match="--compiled_kernels = True, there are none here"):
        plan(settings_of(compiled_kernels=True, model_preset="tiny"), machine(GIB))


@pytest.mark.parametrize(("flags", "budget"), CASES)
def test_what_is_said_to_fit_does_fit(flags: dict[str, Any], budget: int) -> None:
    with pytest.raises(DoesNotFit) as refusal:
        plan(settings_of(**flags), machine(budget))
    told, *changes = refusal.value.problems
    assert "in phase" in told and "micro-batch" in told and "tokens" in told and "free" in told
    assert 1 <= len(changes) <= 3
    for change in changes:
        flag, value = re.match(r"--(\w+)=(\S+)", change).groups()  # type: ignore[union-attr]
        if flag == "memory_budget":
            assert plan(settings_of(**flags), machine(parse_size(value))).peak_bytes <= parse_size(value)
        elif "would fit" in change:
            assert plan(settings_of(**{**flags, flag: value}), machine(budget)).peak_bytes <= budget
