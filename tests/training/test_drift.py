"""A few MiB that the system takes of the margin end no run; a limit that is really lowered makes another plan."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

import devices
from config import load
from memory.cost.prediction import Machine
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
    keeper = keeping.Keeper(
        config, replace(least, budget_bytes=budget.host_bytes), budget, none_fits, device=devices.pick("cpu", 0),
        monitor=cast(Any, SimpleNamespace(watch=lambda budget_bytes, from_now: None)), log=cast(Any, None),
    )  # fmt: skip
    keeper._look(1)
    assert (keeper.exhausted is not None) == ends
