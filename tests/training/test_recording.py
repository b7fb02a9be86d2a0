"""What is told at the end is of all processes: one that took more than its budget is not hidden by the others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from settings.declared import Config
from training.processes.group import Group
from training.recording import Recorder

MIB = 1 << 20


def recorder_of(peak_bytes: int, group: Group | None = None) -> Recorder:
    """Of the run of one process, which stands still."""
    group = group or Group()
    live: Any = SimpleNamespace(
        device=SimpleNamespace(is_separate_memory=False),
        monitor=SimpleNamespace(
            peak_bytes=peak_bytes,
            counted_peak_bytes=peak_bytes,
            phase_peaks={"start": MIB, "evaluation": peak_bytes},
            cost_seconds=0.0,
            watched_seconds=lambda: 1.0,
        ),
        controller=SimpleNamespace(
            plan=SimpleNamespace(budget_bytes=700 * MIB),
            allowed_bytes=700 * MIB,
            cleaner=SimpleNamespace(total_seconds=0.0),
        ),
        group=group,
        is_main=group.rank == 0,
        state=SimpleNamespace(step=9, first_eval_loss=None, best_eval_loss=None, best_evaluation=None),
        run=SimpleNamespace(run_dir="runs/mine"),
        log=SimpleNamespace(path="logs/metrics.jsonl"),
        train=Config().with_changes(max_steps=9).train,
        divergence=SimpleNamespace(skipped=[], rate_factor=1.0),
    )
    plan: Any = SimpleNamespace(peak_bytes=600 * MIB, seconds=1.0, seconds_total=None)
    return Recorder(live, plan)


class BesideAnother(Group):
    """The group of a process beside one that took more than its budget, in an evaluation."""

    def all_reduce_max(self, *numbers: float) -> list[float]:
        return [max(number, 870 * MIB) for number in numbers]

    def first_of(self, value: Any) -> Any:
        return value or "after the last step, in evaluation, on process 1"


def test_another_process_over_its_budget() -> None:
    other = Group()
    other.rank = 1
    assert recorder_of(870 * MIB, other).summary().first_over == BesideAnother().first_of(None)
    over = recorder_of(214 * MIB, BesideAnother()).summary().over_budget()
    assert "on process 1" in over and "the peak was 870.0 MiB" in over and "--memory_budget=870M" in over
