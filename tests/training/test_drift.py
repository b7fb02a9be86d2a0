"""A few MiB that the system takes of the margin end no run; a limit that is really lowered makes another plan."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

import devices
from config import load
from memory.estimate.workload import Machine
from memory.observe.budget import Budget
from memory.plan import plan
from settings.errors import DoesNotFit
from training.budget import keeping
from units import GIB, MIB

MARGIN = 32 * MIB


@pytest.mark.parametrize(("lost", "ends"), [(5 * MIB, False), (60 * MIB, True)])
def test_drift_is_no_smaller_budget(monkeypatch: pytest.MonkeyPatch, lost: int, ends: bool) -> None:
    config = load(
        "train", {"train_file": "x", "effective_batch_size": "1", "max_seq_len": "64", "memory_mode": "ultra"}
    )
    least = plan(config, Machine(4 * GIB, GIB))
    budget = Budget(least.peak_bytes, None, GIB, (), "cgroup", MARGIN)

    def none_fits(*_: Any) -> Any:
        raise DoesNotFit("no way fits")

    monkeypatch.setattr(keeping, "measure_budget", lambda *_: replace(budget, host_bytes=budget.host_bytes - lost))
    monkeypatch.setattr(keeping, "LOOK_SECONDS", 0.0)
    monitor: Any = SimpleNamespace(
        watch=lambda budget_bytes, from_now: None, pressure=lambda: 0.0, peak_bytes=0, budget_bytes=budget.host_bytes,
        counted_peak_bytes=0, counted_phase="train", phase_peaks={},
    )  # fmt: skip
    now = replace(least, budget_bytes=budget.host_bytes)
    log: Any = None
    keeper = keeping.Keeper(
        config,
        now,
        budget,
        none_fits,
        device=devices.pick("cpu", 0),
        monitor=monitor,
        log=log,
        shape="",
        local_processes=1,
    )
    keeper.after_step(1)
    assert (keeper.exhausted is not None) == ends
