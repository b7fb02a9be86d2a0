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
from settings.errors import DoesNotFit, UserError
from settings.loading import load

pytestmark = pytest.mark.usefixtures("processor_class")
CHOICE = ExecutionPlan(2, 2, 1, 1, 2, "float32", "float32", 8 * MIB, "small")


def plan_of_size(size: int, choice: ExecutionPlan = CHOICE) -> Plan:
    return Plan(choice, 4, 2 * GIB, size, {}, {}, 1.0, 2)


def labels(
    *, size: int = GIB, less: int = 100 * MIB, most: int = 20, choice: ExecutionPlan = CHOICE, **flags: Any
) -> list[str]:
    words = {"train_file": "x", "model_preset": "tiny", **flags}
    config = load("train", {name: str(value) for name, value in words.items()})

    def plan_of(other: Config) -> Plan:
        if other.memory.memory_mode == "ultra":
            raise DoesNotFit("it does not")
        return plan_of_size(size - less)

    return [each.label for each in what_else(config, plan_of_size(size, choice), plan_of, most)]


def test_what_is_asked_for_already_is_no_change() -> None:
    found = labels()
    assert {"memory_budget=512M", "memory_mode=low", "mixed_precision=bf16", "effective_batch_size=2"} <= set(found)
    assert "memory_mode=ultra" not in found, "which does not fit"
    assert "optimizer=adafactor" not in found and "lora_rank=8" not in found
    assert "optimizer=adafactor" in labels(optimizer="adamw")
    assert "memory_mode=low" not in labels(memory_mode="low")


@pytest.mark.parametrize(
    ("flags", "is_told"), [({"is_finetune": True}, True), ({"is_finetune": True, "lora_rank": 4}, False)]
)
def test_adapters_are_for_finetuning(flags: dict[str, Any], is_told: bool) -> None:
    found = labels(**flags)
    assert ("lora_rank=8" in found) == is_told
    assert ("mixed_precision=bf16" in found) == is_told, "the weights below adapters are narrow already"


def test_a_run_that_goes_on_is_offered_what_it_may_change() -> None:
    """What defines it is refused there; and adapters need a base."""
    flags = {"is_finetune": True, "optimizer": "adamw"}
    assert {"optimizer=adafactor", "lora_rank=8", "memory_mode=low", "batch_size_per_gpu=1"} <= set(labels(**flags))
    goes_on = labels(**flags, is_keep_training=True, run_name="mine")
    assert {"memory_mode=low", "batch_size_per_gpu=1"} <= set(goes_on)
    assert not {"optimizer=adafactor", "max_seq_len=256", "effective_batch_size=2"} & set(goes_on)
    assert "lora_rank=8" not in labels(**flags, finetune_from="none")


# --- a refusal


def settings_of(**flags: Any) -> Config:
    return load("train", {"train_file": "x", **{name: str(value) for name, value in flags.items()}})


def machine(budget: int) -> Machine:
    return Machine(budget, 16 * GIB, 170 * MIB, tuple((dtype, processor.here().rate(dtype, 2)) for dtype in DTYPES))


CASES: list[tuple[dict[str, Any], int]] = [
    ({"model_preset": "t5-base", "optimizer": "adamw", "mixed_precision": "no"}, 2 * GIB),
    (
        {
            "model_preset": "t5-small",
            "max_seq_len": 2048,
            "batch_size_per_gpu": 16,
            "effective_batch_size": 32,
            "objective": "pairs",
        },
        GIB,
    ),
]


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
