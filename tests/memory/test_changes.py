"""A change of one flag is planned as it would be if it were typed, and told where that takes less."""

from __future__ import annotations

from typing import Any

import pytest

from config import Config, DoesNotFit, load
from memory.alternatives import adapts_a_base, may_change
from memory.changes import planned_changes
from memory.estimate.workload import ExecutionPlan
from memory.plan import Plan
from units import GIB, MIB

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

    return [each.label for each in planned_changes(config, plan_of_size(size, choice), plan_of, most)]


def test_what_is_asked_for_already_is_no_change() -> None:
    found = labels()
    assert {"memory_budget=512M", "memory_mode=low", "mixed_precision=bf16", "effective_batch_size=2"} <= set(found)
    assert "memory_mode=ultra" not in found, "which does not fit"
    assert "optimizer=adafactor" not in found and "lora_rank=8" not in found
    assert "optimizer=adafactor" in labels(optimizer="adamw")
    assert "memory_mode=low" not in labels(memory_mode="low")
    assert "mixed_precision=bf16" not in labels(mixed_precision="no")


@pytest.mark.parametrize(
    ("flags", "is_told"), [({"is_finetune": True}, True), ({"is_finetune": True, "lora_rank": 4}, False)]
)
def test_adapters_are_for_finetuning(flags: dict[str, Any], is_told: bool) -> None:
    found = labels(**flags)
    assert ("lora_rank=8" in found) == is_told
    assert ("mixed_precision=bf16" in found) == is_told, "the weights below adapters are narrow already"


def test_a_run_that_goes_on_is_offered_what_it_may_change() -> None:
    """What defines it is refused there; and adapters need a base."""
    config = load("train", {"train_file": "x", "is_finetune": "True", "model_preset": "tiny", "optimizer": "adamw"})
    names = ("optimizer", "max_seq_len", "effective_batch_size", "mixed_precision", "memory_mode", "batch_size_per_gpu")
    assert all(may_change(config, name) for name in names) and adapts_a_base(config)
    goes_on = config.changed(is_keep_training=True)
    assert [name for name in names if may_change(goes_on, name)] == ["memory_mode", "batch_size_per_gpu"]
    assert not adapts_a_base(config.changed(finetune_from=None))
