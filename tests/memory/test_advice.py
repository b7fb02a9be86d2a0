"""A change of one flag is planned as it would be if it were typed, and told where that takes less."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from devices import processor
from memory.advice import changes, what_else
from memory.estimate.workload import ExecutionPlan, Machine
from memory.machines import DTYPES
from memory.plan import plan
from settings.declared import Config
from settings.errors import DoesNotFit, UserError
from settings.loading import load
from support.units import GIB, MIB, parse_size

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


LARGE = {"model_preset": "t5-base", "optimizer": "muon", "max_grad_norm": 1, "max_seq_len": 16}
SMALL = {"memory_mode": "ultra", "optimizer": "adafactor", "max_grad_norm": 0, "max_seq_len": 15}
TUNED = {**SMALL, "is_finetune": True, "finetune_from": "x"}
CHOICE = ExecutionPlan(2, 1, 1, 0, 2, "float32", "float32", MIB)


@pytest.mark.parametrize(
    ("flags", "rows_at_once", "storage", "rows", "labels"),
    [
        (
            LARGE,
            2,
            "float32",
            9,
            "memory_mode=low memory_mode=ultra batch_size_per_gpu=1 mixed_precision=bf16 optimizer=adafactor "
            "max_grad_norm=0 max_seq_len=8 effective_batch_size=4 model_preset=t5-small",
        ),
        ({**SMALL, "model_preset": "t5-small"}, 1, "bfloat16", 1, "memory_mode=low"),
        ({**SMALL, "memory_mode": "low", "model_preset": "t5-3b", "d_ff": 64}, 1, "bfloat16", 1, "memory_mode=ultra"),
        ({**LARGE, **SMALL, "optimizer": "adamw"}, 1, "int8", 1, "memory_mode=low optimizer=adafactor model_preset="),
        (TUNED, 1, "bfloat16", 1, "memory_mode=low lora_rank=8"),
        ({**TUNED, "lora_rank": 4, "optimizer": "adamw"}, 1, "float32", 1, "memory_mode=low lora_base=int4"),
        ({**TUNED, "lora_rank": 4}, 1, "int4", 1, "memory_mode=low"),
        ({**LARGE, **SMALL, "is_keep_training": True, "optimizer": "adamw"}, 1, "int8", 2, "memory_mode=low"),
    ],
)
def test_changes_that_may_take_less(
    flags: dict[str, Any], rows_at_once: int, storage: str, rows: int, labels: str
) -> None:
    choice = ExecutionPlan(rows_at_once, 1, 1, 0, 2, storage, "float32", MIB)
    proposed = list(changes(settings_of(**flags), choice, rows))
    assert " ".join(label for label, _ in proposed).startswith(labels) and len(proposed) == len(labels.split())
    for label, config in proposed:
        name, value = label.split("=")
        assert str(config.as_dict()[name]) == value


def test_what_else_helps_is_what_takes_less() -> None:
    def planned(peak: int, **change: Any) -> Any:
        return SimpleNamespace(choice=CHOICE, effective_batch_size=1, peak_bytes=peak, seconds=1.5, **change)

    def plan_of(config: Config) -> Any:
        if config.memory.memory_mode == "low":
            raise UserError("does not fit")
        is_same = config.memory.memory_mode == "ultra"
        return planned(511 * MIB if is_same else 300 * MIB)

    config = settings_of(**LARGE)
    helping = what_else(config, planned(512 * MIB), plan_of, most=3)
    labels = ["memory_budget=256M", "batch_size_per_gpu=1", "mixed_precision=bf16"]
    assert [change.label for change in helping] == labels, "what takes a MiB less is no help"
    assert (helping[0].peak_bytes, helping[0].batch_size_per_gpu, helping[0].fits) == (300 * MIB, 2, True)
    assert len(what_else(config, planned(511 * MIB), plan_of, most=99)) == 6, "256 MiB are the least"
