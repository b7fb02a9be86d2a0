"""The summary of a run, and of one in which nothing was left to do."""

from __future__ import annotations

from dataclasses import replace

from memory.machines import target_machine
from memory.plan import plan
from settings.loading import load
from training.report.summary import Summary, detail_rows, next_commands, parts_rows, result_rows, resume_command

DONE = Summary(
    steps=40,
    steps_here=40,
    seconds=20.0,
    tokens_per_second=1234.5,
    first_eval_loss=9.5,
    best_eval_loss=3.25,
    planned_peak_bytes=200 << 20,
    measured_peak_bytes=190 << 20,
    budget_bytes=1 << 30,
    phase_peaks={"load": 150 << 20, "samples": 1},
    care_seconds=0.5,
    watched_seconds=25.0,
    model_dir="model_save/x",
)


def test_the_summary_tells_what_was_left_out() -> None:
    assert "inf or nan" not in dict(detail_rows(DONE))
    assert dict(detail_rows(replace(DONE, skipped_batches=1)))["inf or nan"] == "1 batch skipped"
    slower = replace(DONE, skipped_batches=4, rate_factor=0.5)
    assert dict(detail_rows(slower))["inf or nan"] == "4 batches skipped, learning rate x 0.5"


def test_the_summary_of_a_run() -> None:
    assert result_rows(DONE) == [
        ("model", "model_save/x"),
        ("evaluation loss", "9.500 -> 3.250"),
        ("peak memory", "190.0 MiB, within the budget of 1.00 GiB"),
    ]
    rows = dict(detail_rows(DONE))
    assert rows["steps"] == "40 in 20s, 1,234 tokens/s"
    assert rows["peak"] == "planned 200.0 MiB, measured 190.0 MiB (-5%)"
    assert rows["monitoring and cleanup"] == "0.5 s, 2.0% of the run"
    assert rows["  in load"] == "150.0 MiB" and "  in samples" not in rows


def test_the_parts_of_a_peak_add_up() -> None:
    planned = plan(load("train", {"train_file": "any"}), target_machine("laptop_8gb"))
    shown = [float(size.split()[0]) * {"MiB": 1, "GiB": 1024}[size.split()[1]] for _, size in parts_rows(planned)]
    assert abs(sum(shown) - planned.peak_bytes / 2**20) < 1 + 0.005 * 1024 * len(shown)


def test_the_plan_is_held_against_the_run_and_not_its_probe() -> None:
    """A probe is a second process beside this one, counted to the budget; the plan speaks of the run alone."""
    phases = {"start": 90 << 20, "prepare": 40 << 20, "probe": 350 << 20, "load": 150 << 20, "train": 210 << 20}
    rows = dict(detail_rows(replace(DONE, measured_peak_bytes=350 << 20, phase_peaks=phases)))
    assert rows["peak"] == "planned 200.0 MiB, measured 210.0 MiB (+5%)" and rows["  in probe"] == "350.0 MiB"
    lower = dict(detail_rows(replace(DONE, measured_peak_bytes=210 << 20, phase_peaks={**phases, "probe": 150 << 20})))
    assert lower["peak"] == rows["peak"] and "  in probe" not in lower


def test_a_run_that_was_done_before_tells_no_rates() -> None:
    rows = dict(detail_rows(replace(DONE, steps_here=0, seconds=0.0, tokens_per_second=0.0, first_eval_loss=None)))
    assert rows["steps"] == "40, all done before; --max_steps=80 trains further"
    assert "monitoring and cleanup" not in rows and len(result_rows(replace(DONE, first_eval_loss=None))) == 2


def test_the_next_commands_take_a_short_prompt() -> None:
    asked, *_ = next_commands("m", True, "it's " + "long " * 40)
    assert asked.count("'") == 2 and len(asked) < 150 and asked.endswith("long'")


def test_a_run_over_its_budget_says_when_and_what_would_hold_it() -> None:
    assert DONE.over_budget() == ""
    over = replace(DONE, measured_peak_bytes=(1 << 30) + 1, first_over="at step 7")
    assert dict(result_rows(over))["peak memory"].endswith("OVER the budget of 1.00 GiB, first at step 7")
    told = over.over_budget()
    assert "first at step 7" in told and "saved in model_save/x" in told and "--memory_budget=1025M" in told


def test_a_peak_from_before_the_budget_was_lowered_is_not_called_within_it() -> None:
    lowered = replace(DONE, measured_peak_bytes=492 << 20, budget_bytes=470 << 20, counted_peak_bytes=440 << 20)
    shown = dict(result_rows(lowered))["peak memory"]
    assert shown == "440.0 MiB, within the budget of 470.0 MiB since it was lowered; 492.0 MiB before"
    tight = dict(result_rows(replace(lowered, counted_peak_bytes=480 << 20)))["peak memory"]
    assert tight.startswith("480.0 MiB, in the margin above the budget of 470.0 MiB") and "492.0 MiB before" in tight
    over = replace(lowered, counted_peak_bytes=480 << 20, first_over="at step 7")
    assert dict(result_rows(over))["peak memory"] == "480.0 MiB, OVER the budget of 470.0 MiB, first at step 7"
    assert "the peak was 480.0 MiB" in over.over_budget() and "--memory_budget=492M" in over.over_budget()
    kept = dict(result_rows(replace(lowered, budget_bytes=500 << 20, counted_peak_bytes=440 << 20)))["peak memory"]
    assert kept == "492.0 MiB, within the budget of 500.0 MiB"


def test_a_gpu_and_the_ram_beside_it_are_told_apart() -> None:
    phases = {"probe": 1200 << 20, "train": 700 << 20}
    kept = replace(DONE, phase_peaks=phases, host_peak_bytes=1200 << 20, host_budget_bytes=2 << 30)
    assert dict(detail_rows(kept))["  in probe"] == "1.17 GiB"
    assert kept.over_budget() == "" and dict(detail_rows(kept))["peak"] == "planned 200.0 MiB, measured 190.0 MiB (-5%)"
    assert dict(result_rows(kept))["peak RAM"] == "1.17 GiB, within the budget of 2.00 GiB"
    over = replace(kept, host_budget_bytes=1 << 30, first_over="at step 1")
    rows = dict(result_rows(over))
    assert rows["peak memory of the device"].endswith("within the budget of 1.00 GiB") and "OVER" in rows["peak RAM"]
    told = over.over_budget()
    assert "exceeded in RAM" in told and "the peak was 1.17 GiB" in told and "--memory_budget=1200M" in told
    on_device = replace(kept, measured_peak_bytes=3 << 30, first_over="at step 7")
    assert "RAM" not in on_device.over_budget() and "--memory_budget=3072M" in on_device.over_budget()


def test_a_hint_to_resume_is_a_whole_command() -> None:
    config = load("train", {"train_file": "x", "run_name": "my run", "output_dir": "else where"})
    assert resume_command(config.as_dict()) == (
        "python train_low_mem.py train --is_keep_training=True --run_name='my run' --output_dir='else where'"
    )
    assert resume_command(load("dpo", {"train_file": "x", "run_name": "d"}).as_dict()).startswith(
        "python train_low_mem.py dpo "
    )
    command = resume_command(load("train", {"train_file": "x", "run_name": "m", "weights_dir": "/fast"}).as_dict())
    assert command.endswith("--run_name=m --weights_dir=/fast")
    kept = resume_command(
        load("train", {"train_file": "x", "run_name": "m", "device": "cpu", "log_with": "tensorboard"}).as_dict()
    )
    assert kept.endswith("--run_name=m --device=cpu --log_with=tensorboard")
