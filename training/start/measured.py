"""Are the rows of now those that a run's best numbers were measured on? Where they are not, the best is sought anew.

A file of data may have grown or changed since a run was saved, or an evaluation may read more of it. The run goes on all the
same, but a loss on some rows says nothing of one on others, so that no model is the best by both. What is compared are the
rows themselves: the same ones may lie elsewhere, or have been prepared again.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from config import Config
from data.batches.loader import StepLoader
from language import say
from settings.fields import AUTO, counted
from training.checkpoints.state import TrainingState
from training.evaluation.stopping import LOSS, MeasuredOn


def measured_on(config: Config, train: StepLoader, held_out: StepLoader) -> dict[str, Any]:
    """What the evaluations of a run mean, as its state keeps it: the fields of `MeasuredOn`. Reads 256 rows of each."""
    asked = config.metrics.eval_generate_rows
    answered = 0 if asked == AUTO else min(int(asked), held_out.num_rows)
    read = min(config.train.eval_rows, held_out.num_rows)
    content = train.content() + held_out.content()
    return asdict(MeasuredOn(content, train.num_rows, held_out.num_rows, read, answered))


def taken_up(state: TrainingState, now: dict[str, Any] | None, metric: str) -> tuple[TrainingState, list[str]]:
    """A saved state over the rows of now: without its best numbers where they were measured on others.

    Args:
        now: of `measured_on`; None: not known, as what a checkpoint of an earlier version was measured on.
        metric: which number decides; see `BestMetric`.
    Returns:
        the state, and what is to be told.
    """
    before, state = state.measured_on, replace(state, measured_on=now)
    if before is None or now is None:
        return state, []
    is_other = before["content"] != now["content"]
    is_loss_anew = is_other or before["eval_rows"] != now["eval_rows"]
    is_score_anew = is_other or before["answered_rows"] != now["answered_rows"]
    if is_loss_anew:
        state = replace(state, best_eval_loss=None, best_evaluation=None)
    if is_loss_anew if metric == LOSS else is_score_anew:
        state = replace(state, best_metric=None)
    if is_other:
        return state, [_changed(before, now)]
    compared = [(LOSS, "eval_rows")] * is_loss_anew + [(metric, "answered_rows")] * (is_score_anew and metric != LOSS)
    told = "the best {metric} is sought anew: evaluations measured it on {before}, and now on {now}"
    return state, [
        say(told, metric=name, before=counted(before[rows], "row"), now=counted(now[rows], "row"))
        for name, rows in compared
    ]


def _changed(before: dict[str, Any], now: dict[str, Any]) -> str:
    return say(
        "the data have changed since this run was saved: from {before} and {held_out} held out to {now} and {now_held_out}; "
        "rows that were held out may be trained on now, and the best evaluation is sought anew",
        before=counted(before["train_rows"], "row"), held_out=f"{before['held_out_rows']:,}",
        now=counted(now["train_rows"], "row"), now_held_out=f"{now['held_out_rows']:,}",
    )  # fmt: skip
