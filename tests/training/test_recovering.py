"""After a step that memory did not suffice for a run takes a smaller plan, goes back, or ends; and says why."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.step import OutOfMemory
from settings.errors import DoesNotFit
from training import recovering
from training.divergence import Divergence
from training.processes.group import Group


class Live:
    """Stands for a run, and remembers what it was called for."""

    def __init__(self, exhausted: str | None = None) -> None:
        self.calls: list[Any] = []
        self.controller = SimpleNamespace(
            exhausted=exhausted, after_out_of_memory=lambda *facts: self.calls.append(facts)
        )
        self.group = Group()
        self.divergence = Divergence()
        self.last_good = 4
        self.run = SimpleNamespace(run_dir=Path("runs/mine"))
        self.resume_command = "python train_low_mem.py train --is_keep_training=True"
        self.checkpoints = SimpleNamespace(latest=lambda: Path("step_4"))

    def follow_plan(self) -> None:
        self.calls.append("follow")

    def roll_back(self, reason: str) -> None:
        self.calls.append(reason)


@pytest.mark.parametrize("has_changed", [False, True])
def test_where_memory_did_not_suffice_a_smaller_plan_runs_the_same_rows(has_changed: bool) -> None:
    error = MemoryError()
    here, elsewhere = Live(), Live()
    recovering.recover(cast(Any, here), OutOfMemory(has_changed, error), 5)
    recovering.recover(cast(Any, elsewhere), OutOfMemory(has_changed, None), 5)
    follow = recovering.CHANGED if has_changed else "follow"
    assert here.calls == [(error, 5), follow] and elsewhere.calls == [follow]
    assert here.divergence.skipped == []


def test_where_nothing_is_left_to_shrink_the_run_ends() -> None:
    with pytest.raises(DoesNotFit, match=r"no smaller plan.*step 4 is saved"):
        recovering.recover(cast(Any, Live(exhausted="no smaller plan")), OutOfMemory(True, None), 5)
