"""The summary of a run, and of one in which nothing was left to do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from memory.machines import target_machine
from memory.plan import plan
from settings.loading import load
from training.report.summary import Summary, detail_rows, next_commands, parts_rows, result_rows, resume_command

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
    phase_peaks={"load": 150 * MIB, "samples": 1},
    care_seconds=0.5,
    watched_seconds=25.0,
    model_dir="model_save/x",
)
LOWERED = replace(DONE, measured_peak_bytes=492 * MIB, budget_bytes=470 * MIB, counted_peak_bytes=440 * MIB)
# A probe is a second process beside the run; the plan speaks of the run alone.
PROBED = {"start": 90 * MIB, "prepare": 40 * MIB, "probe": 350 * MIB, "load": 150 * MIB, "train": 210 * MIB}
ON_GPU = replace(
    DONE,
    phase_peaks={"probe": 1200 * MIB, "train": 700 * MIB},
    host_peak_bytes=1200 * MIB,
    host_budget_bytes=2048 * MIB,
)


def test_the_summary_of_a_run() -> None:
    assert result_rows(DONE) == [
        ("model", "model_save/x"),
        ("evaluation loss", "9.500 -> 3.250"),
        ("peak memory", "190.0 MiB, within the budget of 1.00 GiB"),
    ]
    assert detail_rows(DONE) == [
        ("steps", "40 in 20s, 1,234 tokens/s"),
        ("peak", "planned 200.0 MiB, measured 190.0 MiB (-5%)"),
        ("  in load", "150.0 MiB"),
        ("monitoring and cleanup", "0.5 s, 2.0% of the run"),
    ]


@pytest.mark.parametrize(
    ("changes", "row", "text"),
    [
        ({"skipped_batches": 4, "rate_factor": 0.5}, "inf or nan", "4 batches skipped, learning rate x 0.5"),
        ({"steps_here": 0}, "steps", "40, all done before; --max_steps=80 trains further"),
        ({"steps_here": 5}, "steps", "40, the last 5 in 20s, 1,234 tokens/s"),
        (
            {"measured_peak_bytes": 350 * MIB, "phase_peaks": PROBED},
            "peak",
            "planned 200.0 MiB, measured 210.0 MiB (+5%)",
        ),
    ],
)
def test_the_details(changes: dict[str, Any], row: str, text: str) -> None:
    rows = dict(detail_rows(replace(DONE, **changes)))
    assert rows[row] == text
    assert ("monitoring and cleanup" in rows) == (changes.get("steps_here") != 0)
    assert len(result_rows(replace(DONE, first_eval_loss=None))) == 2


def test_the_parts_of_a_peak_add_up() -> None:
    plan_of_8gb = plan(load("train", {"train_file": "any"}), target_machine("laptop_8gb"))
    sizes = [float(size.split()[0]) * {"MiB": 1, "GiB": 1024}[size.split()[1]] for _, size in parts_rows(plan_of_8gb)]
    assert abs(sum(sizes) - plan_of_8gb.peak_bytes / MIB) < 1 + 0.005 * 1024 * len(sizes)


def test_the_next_commands_take_a_short_prompt() -> None:
    first, *_ = next_commands("m", True, "it's " + "long " * 60)
    assert first.count("'") == 2 and len(first) < 150 and first.endswith("long'")
    first, *_ = next_commands("m", True, "long " * 60 + "<extra_id_0> end")
    assert "<extra_id_0>" in first and len(first) < 150
    first, *_ = next_commands("m", True, "long " * 60 + "<extra_id_0>")
    assert first.endswith("<extra_id_0>'"), "a gap at the end of the text is the question"


@pytest.mark.parametrize(
    ("changes", "peak", "parts"),
    [
        # The budget was exceeded.
        (
            {"measured_peak_bytes": 1024 * MIB + 1, "first_over": "at step 7"},
            "1.00 GiB, OVER the budget of 1.00 GiB, first at step 7",
            ["first at step 7", "saved in model_save/x", "--memory_budget=1025M"],
        ),
        # The budget was lowered during the run, and the peak before that is not within it.
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


def test_a_gpu_and_the_ram_beside_it_are_kept_apart() -> None:
    assert dict(detail_rows(ON_GPU))["  in probe"] == dict(detail_rows(ON_GPU))["peak RAM"] == "1.17 GiB"
    assert dict(detail_rows(ON_GPU))["peak"] == "planned 200.0 MiB, measured 190.0 MiB (-5%)"
    assert dict(result_rows(ON_GPU))["peak RAM"] == "1.17 GiB, within the budget of 2.00 GiB"
    assert ON_GPU.over_budget() == ""
    over = replace(ON_GPU, host_budget_bytes=1 << 30, first_over="at step 1")
    rows = dict(result_rows(over))
    assert rows["peak memory of the device"].endswith("within the budget of 1.00 GiB") and "OVER" in rows["peak RAM"]
    for part in ("exceeded in RAM", "the peak was 1.17 GiB", "--memory_budget=1200M"):
        assert part in over.over_budget()
    device_over = replace(ON_GPU, measured_peak_bytes=3 << 30, first_over="at step 7")
    assert "RAM" not in device_over.over_budget() and "--memory_budget=3072M" in device_over.over_budget()


@pytest.mark.parametrize(
    ("command", "flags", "words"),
    [
        ("train", {"run_name": "my run", "output_dir": "else where"}, "--run_name='my run' --output_dir='else where'"),
        ("dpo", {"run_name": "d"}, "--run_name=d"),
        ("train", {"run_name": "m", "weights_dir": "/fast"}, "--run_name=m --weights_dir=/fast"),
        ("train", {"run_name": "m", "device": "cpu", "log_with": "x"}, "--run_name=m --device=cpu --log_with=x"),
    ],
)
def test_a_hint_to_resume_is_a_whole_command(command: str, flags: dict[str, Any], words: str) -> None:
    config = load(command, {"train_file": "x", **flags})
    assert resume_command(config.as_dict()) == f"python train_low_mem.py {command} --is_keep_training=True {words}"
