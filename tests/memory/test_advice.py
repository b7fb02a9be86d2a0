"""A change of one flag is planned as it would be if it were typed, and told where that takes less."""

from __future__ import annotations

import re
from typing import Any

import pytest

from common.units import GIB, MIB, parse_size
from devices import processor
from memory.estimate.workload import Machine
from memory.machines import DTYPES
from memory.plan import plan
from settings.declared import Config
from settings.errors import DoesNotFit
from settings.loading import load

pytestmark = pytest.mark.usefixtures("processor_class")


def settings_of(**flags: Any) -> Config:
    return load("train", {"train_file": "x", **{name: str(value) for name, value in flags.items()}})


def machine(budget: int) -> Machine:
    return Machine(budget, 16 * GIB, 170 * MIB, tuple((dtype, processor.here().rate(dtype, 2)) for dtype in DTYPES))


@pytest.mark.parametrize(
    ("flags", "budget"),
    [
        (
            {"model_preset": "t5-base", "optimizer": "adamw", "mixed_precision": "no", "effective_batch_size": 8},
            2 * GIB,
        ),
        ({"model_preset": "t5-small", "max_seq_len": 2048, "batch_size_per_gpu": 16, "objective": "pairs"}, GIB),
    ],
)
def test_what_is_said_to_fit_does_fit(flags: dict[str, Any], budget: int) -> None:
    with pytest.raises(DoesNotFit) as refusal:
        plan(settings_of(**flags), machine(budget))
    sentence, *changes = refusal.value.problems
    assert all(word in sentence for word in ("in phase", "micro-batch", "tokens", "free"))
    assert 1 <= len(changes) <= 3
    for change in changes:
        flag, value = re.match(r"--(\w+)=(\S+)", change).groups()  # type: ignore[union-attr]
        if flag == "memory_budget":
            assert plan(settings_of(**flags), machine(parse_size(value))).peak_bytes <= parse_size(value)
        elif "would fit" in change:
            assert plan(settings_of(**{**flags, flag: value}), machine(budget)).peak_bytes <= budget
