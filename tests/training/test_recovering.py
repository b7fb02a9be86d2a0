"""After a step that failed a run takes a smaller way, goes back, or ends; and says why."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine.step import Outcome
from settings.declared import Config
from training import recovering
from training.divergence import MOST_IN_A_ROW, Divergence
from training.processes.group import Group


class Live:
    """Stands for a run, and remembers what was asked of it."""

    def __init__(self, exhausted: str | None = None, last_good: int = 4) -> None:
        self.asked: list[Any] = []
        choice = SimpleNamespace(compute="float32")
        self.controller = SimpleNamespace(
            exhausted=exhausted,
            plan=SimpleNamespace(effective_batch_size=2, choice=choice),
            after_out_of_memory=lambda *facts: self.asked.append(facts),
        )
        self.group = Group()
        self.divergence, self.state = Divergence(), SimpleNamespace(step=4)
        self.last_good, self.has_saved, self.is_main = last_good, True, True
        loader = SimpleNamespace(rows_of_steps=lambda steps, rows: np.array([[7, 8]]))
        self.run = SimpleNamespace(loader=loader, base=None, run_dir=Path("runs/mine"))
        self.log = SimpleNamespace(event=lambda *name, **fields: self.asked.append(fields))
        self.engine = SimpleNamespace(update=SimpleNamespace(unchecked_norm=None, scaling=None))
        self.config = Config().changed(learning_rate=0.1, run_name="mine")
        self.checkpoints = SimpleNamespace(latest=lambda: Path("step_4"), named_best=lambda: None)

    def follow_plan(self) -> None:
        self.asked.append("follow")

    def roll_back(self, reason: str) -> None:
        self.asked.append(reason)
        self.state.step = self.last_good


def test_where_the_step_before_was_not_finite_its_rows_are_passed_over() -> None:
    """A GPU is asked in the next one; in vain where weights are to blame, which ends as it does elsewhere."""
    live: Any = Live(last_good=2)
    late = Outcome(0.0, False, False, True, is_late=True)
    for turn in range(MOST_IN_A_ROW):
        for step in (3, 4):
            live.divergence.applied(step)
        recovering.recover(live, late, 5)
        assert live.divergence.skipped == [3, 4, 5][: turn + 1] and live.asked[-2]["rows"] == [7, 8]
    assert live.divergence.rate_factor == 0.5
    saved: Any = Live(last_good=4)
    recovering.recover(saved, late, 5)
    assert saved.divergence.skipped == [4], "what was saved was sound: the step before was none that spoils"


@pytest.mark.parametrize("norm, skipped, rate", [(float("nan"), [4, 5, 6], 0.5), (1.0, [], 0.5), (None, [], 0.5)])
def test_a_gradient_that_nobody_has_looked_at_yet_takes_the_blame(
    norm: float | None, skipped: list[int], rate: float
) -> None:
    """A GPU is asked in the next step; where this one was to be saved, its rows are passed over all the same."""
    live: Any = Live(last_good=2)
    live.state.step = 5
    live.engine.update.unchecked_norm = None if norm is None else torch.tensor(norm)
    for turn in range(MOST_IN_A_ROW if skipped else 1):
        live.divergence.applied(5)
        assert live.divergence.rate_factor == 1.0
        recovering.after_unsound(live, 5)
        assert live.divergence.skipped == skipped[: turn + 1] and live.state.step == 2
    assert live.divergence.rate_factor == rate, "after several in a row the run slows down"
