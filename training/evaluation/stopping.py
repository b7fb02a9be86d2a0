"""The best evaluation, and early stopping.

One number decides both: the evaluation loss, or a score of answers. What it needs to know lies in the checkpoint's
state, so that a resumed run stops at the same step as one that was never interrupted.

Source: early stopping with patience: Prechelt 1998, "Early Stopping - But When?".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from settings.fields import counted
from support.language import say
from training.report.run_files import LESS_IS_BETTER

LOSS = "loss"


@dataclass(frozen=True)
class MeasuredOn:
    """Which rows evaluations were measured on; their numbers can be compared where all of it is the same.

    Args:
        content: hex digits that change with the tokens of the rows. train_rows, held_out_rows: how many there were.
        eval_rows, answered_rows: held-out rows that an evaluation read, and that it answered.
    """

    content: str
    train_rows: int
    held_out_rows: int
    eval_rows: int
    answered_rows: int


@dataclass
class BestMetric:
    """The best evaluation so far.

    Args:
        metric: which number of an evaluation counts: loss, or the name of a score.
        patience: evaluations in a row that may be no better before a run stops; 0: it never stops for that.
        value: the best number, None before the first; step: where that was.
        evals_since: evaluations since then.
    """

    metric: str = LOSS
    patience: int = 0
    value: float | None = None
    step: int = 0
    evals_since: int = 0

    @classmethod
    def restore(cls, metric: str, patience: int, state: Mapping[str, Any] | None) -> BestMetric:
        """Continue from what `state` returned, or for a new run from None; another metric than it knows starts over."""
        if state is None or state["metric"] != metric:
            return cls(metric, patience)
        return cls(**{**state, "patience": patience})

    def state(self) -> dict[str, Any]:
        """What `restore` needs, for JSON."""
        return asdict(self)

    def is_best(self, step: int, values: Mapping[str, float]) -> bool:
        """Take in the numbers of one evaluation and say whether it is the best so far; equal is not better, inf and nan
        are never.
        """
        number = values[self.metric]
        figure = self.metric.rpartition("/")[2]  # It may be the figure of one of several validation sets.
        sign = -1 if figure in LESS_IS_BETTER else 1
        is_better = self.value is None or sign * number > sign * self.value
        if not math.isfinite(number) or not is_better:
            self.evals_since += 1
            return False
        self.value = number
        self.step = step
        self.evals_since = 0
        return True

    @property
    def should_stop(self) -> bool:
        """Whether the last evaluations were no better, as many as patience allows."""
        return 0 < self.patience <= self.evals_since

    def remarks(self, step: int) -> list[str]:
        """What is to be told at the end of a run, `step` being its last."""
        remarks: list[str] = []
        if self.should_stop:
            text = "stopped early: {evaluations} in a row no better than {metric} {shown} at step {step}"
            evaluations = counted(self.evals_since, "evaluation")
            value = say("none") if self.value is None else f"{self.value:.4f}"
            remarks.append(say(text, evaluations=evaluations, metric=self.metric, shown=value, step=self.step))
        if self.value is not None and self.step == 0 and self.evals_since > 0:
            text = "no evaluation beat step 0: the published model is from step {step}"
            remarks.append(say(text, step=step))
        return remarks
