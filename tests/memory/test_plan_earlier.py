"""A resumed run keeps its choice, unless the dtype that is asked for now is another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from config import load
from memory.plan import Plan, plan
from memory.prediction import Choice, Machine
from memory.units import GIB, MIB

RATES = (("float32", 1e13), ("bfloat16", 1e13), ("float16", 4e13))
EARLIER = Choice(2, 8, 1, 3, 4, "float32", "float16", 8 * MIB, "small")


def planned(earlier: Choice, **flags: Any) -> Plan:
    config = load("train", {"train_file": "x", "model_preset": "tiny", "effective_batch_size": 16, **flags})
    return plan(config, Machine(8 * GIB, 8 * GIB, rates=RATES), source_tokens=64, target_tokens=32, earlier=earlier)


@pytest.mark.parametrize("precision", ["auto", "fp16"])
def test_goes_on_as_before(precision: str) -> None:
    assert planned(EARLIER, mixed_precision=precision).choice == EARLIER


@pytest.mark.parametrize(("precision", "storage"), [("no", "float32"), ("bf16", "bfloat16")])
def test_a_run_that_overflowed_in_fp16_goes_on_in_another(precision: str, storage: str) -> None:
    choice = planned(EARLIER, mixed_precision=precision).choice
    assert (choice.storage, choice.compute) == (storage, "float32")


def test_other_dtypes_too() -> None:
    stored = replace(EARLIER, storage="bfloat16", compute="float32")
    assert planned(stored, mixed_precision="bf16").choice == stored
    assert planned(stored, mixed_precision="no").choice.storage == "float32"
