"""After a step that failed a run takes a smaller plan, goes back, or ends; and says why."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from engine.step import NotFinite, OutOfMemory
from settings.declared import Config
from settings.errors import DoesNotFit, UserError
from training import recovering
from training.divergence import MOST_IN_A_ROW, Divergence
from training.processes.group import Group


class Live:
    """Stands for a run, and remembers what it was called for."""

    def __init__(self, exhausted: str | None = None, last_good: int = 4) -> None:
        self.calls: list[Any] = []
        choice = SimpleNamespace(compute="float32")
        self.controller = SimpleNamespace(
            exhausted=exhausted,
            plan=SimpleNamespace(effective_batch_size=2, choice=choice),
            after_out_of_memory=lambda *facts: self.calls.append(facts),
        )
        self.group = Group()
        self.divergence, self.state = Divergence(), SimpleNamespace(step=4)
        self.last_good, self.has_saved, self.is_main = last_good, True, True
        loader = SimpleNamespace(rows_of_steps=lambda steps, rows: np.array([[7, 8]]))
        self.run = SimpleNamespace(loader=loader, base=None, run_dir=Path("runs/mine"))
        self.log = SimpleNamespace(event=lambda *name, **fields: self.calls.append(fields))
        self.train = Config().changed(learning_rate=0.1).train
        self.resume_command = "python train_low_mem.py train --is_keep_training=True"
        self.checkpoints = SimpleNamespace(latest=lambda: Path("step_4"), named_best=lambda: None)

    def follow_plan(self) -> None:
        self.calls.append("follow")

    def roll_back(self, reason: str) -> None:
        self.calls.append(reason)
        self.state.step = self.last_good


@pytest.mark.parametrize("has_changed", [False, True])
def test_a_batch_that_is_not_finite_is_passed_over(has_changed: bool) -> None:
    """Where weights have taken it, the run goes back to its last checkpoint first."""
    live: Any = Live(last_good=2)
    recovering.recover(live, NotFinite(has_changed), 5)
    assert live.divergence.skipped == [4] and live.calls[0]["rows"] == [7, 8]
    assert live.calls[1:] == [recovering.CHANGED] * has_changed


def test_after_several_in_a_row_the_run_slows_down() -> None:
    live: Any = Live(last_good=2)
    for turn in range(MOST_IN_A_ROW):
        assert live.divergence.rate_factor == 1.0
        live.divergence.applied(4)
        live.state.step = 4
        recovering.recover(live, NotFinite(True), 5)
        assert live.divergence.skipped == [4, 5, 6][: turn + 1]
    assert live.divergence.rate_factor == 0.5 and live.state.step == 2


def test_where_the_checkpoint_itself_gives_no_finite_numbers_no_rate_helps() -> None:
    live: Any = Live(last_good=4)
    live.checkpoints = SimpleNamespace(latest=lambda: None, named_best=lambda: None)
    for _ in range(MOST_IN_A_ROW - 1):
        recovering.recover(live, NotFinite(True), 5)
    with pytest.raises(UserError, match="diverges at step 5"):
        recovering.recover(live, NotFinite(True), 5)


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
