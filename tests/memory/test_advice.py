"""A change of one flag is planned as it would be if it were typed, and told where that takes less."""

from __future__ import annotations

import re
from typing import Any

import pytest

from common.units import GIB, MIB, parse_size
from devices import processor
from memory.advice import what_else
from memory.estimate.workload import ExecutionPlan, Machine
from memory.machines import DTYPES
from memory.plan import Plan, plan
from settings.declared import Config
from settings.errors import DoesNotFit
from settings.loading import load

pytestmark = pytest.mark.usefixtures("processor_class")
CHOICE = ExecutionPlan(2, 2, 1, 1, 2, "float32", "float32", 8 * MIB, "small")
FINETUNING = {"is_finetune": True}
WITH_ADAMW = {"is_finetune": True, "optimizer": "adamw"}
RESUMED = {**WITH_ADAMW, "is_keep_training": True, "run_name": "mine"}


def settings_of(**flags: Any) -> Config:
    return load("train", {"train_file": "x", **{name: str(value) for name, value in flags.items()}})


@pytest.mark.parametrize(
    ("flags", "offered", "not_offered"),
    [
        (
            {},
            {"memory_budget=512M", "memory_mode=low", "mixed_precision=bf16", "effective_batch_size=2"},
            {"memory_mode=ultra", "optimizer=adafactor", "lora_rank=8"},
        ),
        ({**FINETUNING, "lora_rank": 4}, set(), {"lora_rank=8", "mixed_precision=bf16"}),
        (WITH_ADAMW, {"optimizer=adafactor", "lora_rank=8", "memory_mode=low", "batch_size_per_gpu=1"}, set()),
        # A run that goes on keeps these settings, since they define it.
        (
            RESUMED,
            {"memory_mode=low", "batch_size_per_gpu=1"},
            {"optimizer=adafactor", "max_seq_len=256", "effective_batch_size=2"},
        ),
    ],
)
def test_what_may_be_changed_and_is_not_so_already_is_offered(
    flags: dict[str, Any], offered: set[str], not_offered: set[str]
) -> None:
    def plan_of_size(size: int) -> Plan:
        return Plan(CHOICE, 4, 2 * GIB, size, {}, {}, 1.0, 2)

    def plan_of(other: Config) -> Plan:
        if other.memory.memory_mode == "ultra":
            raise DoesNotFit("it does not")
        return plan_of_size(GIB - 100 * MIB)

    changes = what_else(settings_of(model_preset="tiny", **flags), plan_of_size(GIB), plan_of, most=20)
    labels = {change.label for change in changes}
    assert offered <= labels and not not_offered & labels


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
