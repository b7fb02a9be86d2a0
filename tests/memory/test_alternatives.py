"""Other ways and changes are priced like the plan, which stays the fastest way that fits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from config import Config, load
from devices import processor
from memory.alternatives import _cut, cheapest_changes, other_ways
from memory.cost.prediction import Machine, peak_of, predict
from memory.cost.work import Choice
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


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_change_saves_what_it_says(optimizer: str) -> None:
    config = settings_of(model_preset="t5-small", optimizer=optimizer, effective_batch_size=8)
    where = machine(8 * GIB)
    chosen = plan(config, where)
    changes = cheapest_changes(config, make_work(config, where, None, None), where, chosen.choice, 20)
    found = {change.label: change for change in changes}
    assert all(change.peak_bytes < chosen.peak_bytes and change.fits for change in changes)
    assert changes[0].label == "memory_mode=ultra"
    work = make_work(settings_of(model_preset="t5-small", effective_batch_size=8), where, None, None)
    assert found["optimizer=adafactor"].peak_bytes == peak_of(predict(work, chosen.choice, where))[1]


def test_shorter_rows_have_the_targets_that_they_would_have() -> None:
    """Of text, what is masked goes with the length of a row; of pairs, answers stay as long as they are."""
    where = machine(8 * GIB)

    def half(**flags: Any) -> int:
        config = settings_of(model_preset="t5-small", effective_batch_size=8, **flags)
        work = make_work(config, where, 512, 100)
        choice = plan(config, where, source_tokens=512, target_tokens=100).choice
        found = {change.label: change for change in cheapest_changes(config, work, where, choice, 20)}
        return found["max_seq_len=256"].peak_bytes

    assert half(objective="span") < half(objective="pairs") == half(max_target_len=100)


def test_adapters_are_an_idea_for_finetuning_alone() -> None:
    where = machine(8 * GIB)
    for is_finetune in (True, False):
        flags = {"is_finetune": is_finetune, "objective": "pairs", "model_preset": "t5-small", "optimizer": "adamw"}
        config = settings_of(effective_batch_size=8, **flags)
        work = make_work(config, where, None, None)
        changes = cheapest_changes(config, work, where, plan(config, where).choice, 20)
        assert ("lora_rank=8" in {change.label for change in changes}) == is_finetune


def test_muon_squares_the_columns_where_rows_are_cut() -> None:
    work = make_work(settings_of(model_preset="t5-base", optimizer="muon"), where := machine(16 * GIB), None, None)
    choice = plan(settings_of(model_preset="t5-base", optimizer="muon"), where).choice
    taken = [predict(work, replace(choice, shards=shards), where)["block update"]["one update"] for shards in (1, 2)]
    e = 2 if choice.compute == "bfloat16" else 4
    assert taken[1] - taken[0] == 3 * e * (3072**2 - 768**2)


def test_other_micro_batches_pass_with_as_many_rows_together() -> None:
    config = settings_of(model_preset="t5-base", effective_batch_size=64, max_seq_len=64)
    work = make_work(config, machine(GIB), None, None)
    whole = Choice(8, 8, 1, 0, 4, "bfloat16", "float32", 8 * MIB)
    for choice, rows_of_a_pass in ((whole, 64), (replace(whole, micro_batches_per_pass=2, accumulation_passes=4), 16)):
        for rows in (1, 4, 16):
            other = _cut(work, choice, rows)
            assert (other.batch_size_per_gpu, other.batch_size_per_gpu * other.micro_batches_per_pass) == (
                rows,
                rows_of_a_pass,
            )
            assert other.batch_size_per_gpu * other.gradient_accumulation_steps == 64
