"""Other ways and changes are priced like the plan, which stays the fastest way that fits."""

from __future__ import annotations

from typing import Any

import pytest

from config import Config, load
from devices import processor
from memory.alternatives import cheapest_changes, other_ways
from memory.estimate.peaks import peak_of, predict
from memory.estimate.workload import Machine
from memory.machines import DTYPES
from memory.plan import make_work, plan
from units import GIB, MIB

pytestmark = pytest.mark.usefixtures("processor_class")


def settings_of(**flags: Any) -> Config:
    return load("train", {"train_file": "x", **{name: str(value) for name, value in flags.items()}})


def machine(budget: int) -> Machine:
    return Machine(budget, 16 * 10**9, 200 * MIB, tuple((dtype, processor.here().rate(dtype, 2)) for dtype in DTYPES))


def test_the_planned_way_is_the_fastest_that_fits() -> None:
    config = settings_of(model_preset="t5-base", effective_batch_size=16, max_seq_len=256)
    where = machine(int(1.7 * GIB))
    chosen = plan(config, where)
    ways = other_ways(make_work(config, where, None, None), where, chosen.choice)
    assert ways[0].label == "planned" and ways[0].peak_bytes == chosen.peak_bytes
    assert {way.saved_blocks for way in ways} >= {0, 12, 24}
    assert {way.batch_size_per_gpu for way in ways} >= {1, chosen.choice.batch_size_per_gpu}
    assert all(way.seconds >= chosen.seconds for way in ways if way.fits)
    assert any(not way.fits for way in ways)


def test_a_change_saves_what_it_says() -> None:
    config = settings_of(model_preset="t5-small", optimizer="adamw", effective_batch_size=8)
    where = machine(8 * GIB)
    chosen = plan(config, where)
    changes = cheapest_changes(config, make_work(config, where, None, None), where, chosen.choice, 20)
    found = {change.label: change for change in changes}
    assert all(change.peak_bytes < chosen.peak_bytes and change.fits for change in changes)
    assert changes[0].label == "memory_mode=ultra"
    work = make_work(settings_of(model_preset="t5-small", effective_batch_size=8), where, None, None)
    assert found["optimizer=adafactor"].peak_bytes == peak_of(predict(work, chosen.choice, where))[1]


def test_adapters_are_an_idea_for_finetuning_alone() -> None:
    where = machine(8 * GIB)
    for is_finetune in (True, False):
        flags = {"is_finetune": is_finetune, "objective": "pairs", "model_preset": "t5-small", "optimizer": "adamw"}
        config = settings_of(effective_batch_size=8, **flags)
        work = make_work(config, where, None, None)
        changes = cheapest_changes(config, work, where, plan(config, where).choice, 20)
        assert ("lora_rank=8" in {change.label for change in changes}) == is_finetune
