"""A model's cases are planned like runs; one that does not fit says which budget would do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from commands.doctor import examine_model, name_of, plan_cases
from common.units import MIB
from memory.estimate.workload import Machine
from memory.machines import target_machine
from settings.loading import load
from training.report.progress import Progress


@pytest.fixture
def machine() -> Machine:
    return target_machine("workstation_32gb_amx")


def test_lengths_and_ranks_lie_around_the_settings_and_longer_rows_take_more(machine: Machine) -> None:
    cases = plan_cases(load("doctor", {"model_preset": "tiny", "max_seq_len": "128"}), machine)
    rows = [row for row, _ in cases]
    assert [name_of(row) for row in rows] == [
        "step as planned",
        *(f"sequence length {length}" for length in (32, 64, 128, 256)),
        *(f"LoRA rank {rank}" for rank in (4, 16, 64)),
    ]
    peaks = [row["peak_bytes"] for row in rows]
    assert peaks[1:5] == sorted(peaks[1:5]) and peaks[5:] == sorted(peaks[5:])
    assert all(0 < row["load_bytes"] <= row["peak_bytes"] and row["seconds"] > 0 and not row["outcome"] for row in rows)


@pytest.mark.parametrize("is_slow", [False, True])
def test_what_does_not_fit_or_takes_too_long_is_not_measured(machine: Machine, is_slow: bool) -> None:
    machine = replace(machine, budget_bytes=64 * MIB)
    if is_slow:
        machine = replace(machine, budget_bytes=16_000 * MIB, rates=(("float32", 1e6), ("bfloat16", 1e6)))
    cases = plan_cases(load("doctor", {"model_preset": "tiny", "max_seq_len": "128"}), machine)
    report = examine_model("tiny", cases, machine.budget_bytes, Progress(1, is_main=False))
    assert report["measured"] is None
    assert all(is_slow or "--memory_budget=" in row["outcome"] for row in report["planned"])
    assert all(is_slow or row["peak_bytes"] is None for row in report["planned"])
