"""What a run says of its peak at its end, and how it is gone on with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from settings.loading import load
from training.report.summary import Summary, result_rows, resume_command

MIB = 1 << 20
DONE = Summary(
    steps=40,
    steps_here=40,
    seconds=20.0,
    tokens_per_second=1234.5,
    first_eval_loss=9.5,
    best_eval_loss=3.25,
    planned_peak_bytes=200 * MIB,
    measured_peak_bytes=190 * MIB,
    budget_bytes=1024 * MIB,
    phase_peaks={"load": 150 * MIB},
    care_seconds=0.5,
    watched_seconds=25.0,
    model_dir="model_save/x",
)
LOWERED = replace(DONE, measured_peak_bytes=492 * MIB, budget_bytes=470 * MIB, counted_peak_bytes=440 * MIB)


@pytest.mark.parametrize(
    ("changes", "peak", "parts"),
    [
        # The budget was exceeded.
        (
            {"measured_peak_bytes": 1024 * MIB + 1, "first_over": "at step 7"},
            "1.00 GiB, OVER the budget of 1.00 GiB, first at step 7",
            ["first at step 7", "saved in model_save/x", "--memory_budget=1025M"],
        ),
        # The budget was lowered during the run.
        (vars(LOWERED), "440.0 MiB since the budget was lowered to 470.0 MiB, 492.0 MiB before", []),
        ({**vars(LOWERED), "budget_bytes": 500 * MIB}, "492.0 MiB, within the budget of 500.0 MiB", []),
        (
            {**vars(LOWERED), "counted_peak_bytes": 480 * MIB, "first_over": "at step 7"},
            "480.0 MiB, OVER the budget of 470.0 MiB, first at step 7",
            ["the peak was 480.0 MiB", "--memory_budget=492M"],
        ),
    ],
)
def test_the_peak_is_held_against_the_budget(changes: dict[str, Any], peak: str, parts: list[str]) -> None:
    summary = replace(DONE, **changes)
    assert dict(result_rows(summary))["peak memory"] == peak
    assert bool(summary.over_budget()) == bool(parts) and all(part in summary.over_budget() for part in parts)


@pytest.mark.parametrize(
    ("command", "flags", "words"),
    [
        ("train", {"run_name": "my run", "output_dir": "else where"}, "--run_name='my run' --output_dir='else where'"),
        ("dpo", {"run_name": "d"}, "--run_name=d"),
        ("train", {"run_name": "m", "weights_dir": "/fast"}, "--run_name=m --weights_dir=/fast"),
    ],
)
def test_a_hint_to_resume_is_a_whole_command(command: str, flags: dict[str, Any], words: str) -> None:
    config = load(command, {"train_file": "x", **flags})
    assert resume_command(config.as_dict()) == f"python train_low_mem.py {command} --is_keep_training=True {words}"
