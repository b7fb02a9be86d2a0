"""A model's cases are planned like runs; one that does not fit says which budget would do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from commands.diagnosis.model_memory import Case, choose_case, plan_cases
from memory.estimate.workload import Machine
from memory.machines import target_machine
from settings.loading import load
from units import MIB


@pytest.fixture
def machine() -> Machine:
    return target_machine("workstation_32gb_amx")


def cases_on(machine: Machine, **flags: str) -> list[Case]:
    return plan_cases(load("doctor", {"model_preset": "tiny", "max_seq_len": "128", **flags}), machine)


def test_lengths_and_ranks_lie_around_the_settings_and_longer_rows_take_more(machine: Machine) -> None:
    cases = cases_on(machine)
    assert [case.name for case in cases] == [
        "step as planned",
        *(f"sequence length {length}" for length in (32, 64, 128, 256)),
        *(f"LoRA rank {rank}" for rank in (4, 16, 64)),
    ]
    rows = [case.as_dict() for case in cases]
    peaks = [row["peak_bytes"] for row in rows]
    assert peaks[1:5] == sorted(peaks[1:5]) and peaks[5:] == sorted(peaks[5:])
    assert all(0 < row["load_bytes"] <= row["peak_bytes"] and row["seconds"] > 0 and not row["outcome"] for row in rows)
    assert choose_case(cases) is cases[0]


def test_a_case_that_does_not_fit_names_the_budget_that_would_do(machine: Machine) -> None:
    cases = cases_on(replace(machine, budget_bytes=64 * MIB))
    assert choose_case(cases) is None
    for case in cases:
        row = case.as_dict()
        assert row["peak_bytes"] is None and "--memory_budget=" in row["outcome"]


def test_what_takes_too_long_is_not_measured(machine: Machine) -> None:
    assert choose_case(cases_on(replace(machine, rates=(("float32", 1e6), ("bfloat16", 1e6))))) is None
