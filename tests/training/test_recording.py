"""What is told at the end is of all processes: one that took more than its budget is not hidden by the others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from settings.declared import Config
from training import recording
from training.processes.group import Group
from training.report.summary import Summary

MIB = 1 << 20


class Live:
    """Stands for the run of one process."""

    def __init__(self, rank: int, peak_bytes: int) -> None:
        phases = {"start": MIB, "evaluation": peak_bytes}
        self.device = SimpleNamespace(is_separate_memory=False)
        self.monitor = SimpleNamespace(
            peak_bytes=peak_bytes,
            counted_peak_bytes=peak_bytes,
            phase_peaks=phases,
            cost_seconds=0.0,
            watched_seconds=lambda: 1.0,
        )
        self.controller = SimpleNamespace(
            plan=SimpleNamespace(budget_bytes=700 * MIB),
            allowed_bytes=700 * MIB,
            cleaner=SimpleNamespace(total_seconds=0.0),
        )
        self.group, self.is_main = Group(), rank == 0
        self.group.rank = rank
        self.state = SimpleNamespace(step=9, first_eval_loss=None, best_eval_loss=None, best_evaluation=None)
        self.run = SimpleNamespace(run_dir="runs/mine")
        self.log = SimpleNamespace(path="logs/metrics.jsonl")
        self.train = Config().changed(max_steps=9).train
        self.divergence = SimpleNamespace(skipped=[], rate_factor=1.0)


def summary_of(live: Any) -> Summary:
    plan: Any = SimpleNamespace(peak_bytes=600 * MIB, seconds=1.0, seconds_total=None)
    return recording.Recorder(live, plan).summary()


def test_the_ram_beside_a_gpu_over_its_budget() -> None:
    live = Live(0, 700 * MIB)
    live.device = SimpleNamespace(is_separate_memory=True, memory_peak_bytes=lambda: 300 * MIB)
    live.monitor.budget_bytes = 800 * MIB
    assert summary_of(live).first_over is None
    live.monitor.budget_bytes = 512 * MIB
    over = summary_of(live)
    assert over.first_over == "after the last step, in evaluation" and over.measured_peak_bytes == 300 * MIB
    assert "the peak was 700.0 MiB" in over.over_budget() and "--memory_budget=700M" in over.over_budget()


@pytest.mark.parametrize(("peak", "is_over"), [(690, False), (720, False), (740, True)])
def test_a_peak_is_remembered_where_a_smaller_plan_counts_anew(peak: int, is_over: bool) -> None:
    """Within the margin below a limit that others have lowered it is no reason for exit code 3."""
    told = list[str]()
    live: Any = Live(0, peak * MIB)
    live.controller.allowed_bytes = 732 * MIB
    live.log.tell = told.append
    plan: Any = SimpleNamespace(peak_bytes=600 * MIB, seconds=1.0, seconds_total=None)
    recorder = recording.Recorder(live, plan)
    recorder.note_peak(3)
    live.monitor.counted_peak_bytes = 0
    recorder.note_peak(4)
    summary = recorder.summary()
    assert summary.first_over == ("at step 3" if is_over else None) and len(told) == is_over
    assert summary.counted_peak_bytes == (peak * MIB if peak > 700 else 0)


def test_another_process_over_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    over, main = summary_of(Live(1, 870 * MIB)), Live(0, 214 * MIB)
    assert over.first_over == "after the last step, in evaluation, on process 1"
    monkeypatch.setattr(main.group, "all_reduce_max", lambda mine: [max(mine, 870 * MIB)])
    monkeypatch.setattr(main.group, "first_of", lambda mine: mine or over.first_over)
    told = summary_of(main).over_budget()
    assert "on process 1" in told and "the peak was 870.0 MiB" in told and "--memory_budget=870M" in told
