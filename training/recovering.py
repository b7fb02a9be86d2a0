"""What follows a step that is not done: a smaller plan, rows left out, a lower learning rate, or the end.

Short of memory: a smaller plan, the same rows again. Not finite: past the rows; after several in a row, from the last
checkpoint with half the learning rate. Where weights were changed already, both go back to the last checkpoint first.
Every process comes here together, and decides the same.
"""

from __future__ import annotations

from typing import NoReturn

from engine.step import NotFinite, OutOfMemory
from settings.errors import DoesNotFit, UserError
from support.language import say
from training.checkpoints.runs import publish
from training.divergence import MOST_IN_A_ROW
from training.live import LiveRun
from training.saving import save

CHANGED = say("weights were changed already")
SHOWN_ROWS = 8


def recover(live: LiveRun, outcome: OutOfMemory | NotFinite, number: int) -> None:
    """Go on after step `number`, which memory did not suffice for, or which was not finite."""
    if isinstance(outcome, OutOfMemory):
        _after_out_of_memory(live, outcome, number)
    else:
        _pass_over(live, outcome, number)


def slow_down(live: LiveRun, number: int) -> None:
    """Continue from the last checkpoint with half the learning rate; where that was done often enough, end the run."""
    divergence = live.divergence
    if not divergence.slow_down():
        _end_diverged(live, number)
    live.roll_back(
        say(
            "step {number} is not finite: the learning rate is now {rate_factor:g} of it",
            number=number,
            rate_factor=divergence.rate_factor,
        )
    )


def give_up(live: LiveRun) -> NoReturn:
    """End a run for which nothing is left to shrink, by a DoesNotFit that says what helps."""
    reason = live.controller.exhausted or say("another process cannot reduce its memory any further")
    if live.checkpoints.latest():
        reason = say(
            "{story}; step {step} is saved in {folder}; continue with\n  {command}",
            story=reason,
            step=live.last_good,
            folder=live.run.run_dir,
            command=live.resume_command,
        )
    raise DoesNotFit(reason)


def _after_out_of_memory(live: LiveRun, outcome: OutOfMemory, number: int) -> None:
    """The error came here or on another process: a smaller plan there, the same rows again on all."""
    if outcome.error is not None:
        live.controller.after_out_of_memory(outcome.error, number)
    (exhausted,) = live.group.all_reduce_sum(float(live.controller.exhausted is not None))
    if exhausted:
        if not outcome.has_changed_weights:
            save(live, is_best=False)
        give_up(live)
    if outcome.has_changed_weights:
        live.roll_back(CHANGED)
    else:
        live.follow_plan()


def _pass_over(live: LiveRun, outcome: NotFinite, number: int) -> None:
    """After a step that was not finite on any process: past its rows; where weights suffered, back to a checkpoint."""
    divergence = live.divergence
    divergence.skip(number)
    rows = divergence.rows(live.run.loader, live.controller.plan.effective_batch_size)
    numbers = ", ".join(map(str, rows[:SHOWN_ROWS]))
    further: str = ""
    if len(rows) > SHOWN_ROWS:
        further = say(" and {count} more (see metrics.jsonl)", count=len(rows) - SHOWN_ROWS)
    named_rows = say("row {shown} of the training data", shown=numbers)
    if len(rows) > 1:
        named_rows = say("rows {shown}{further} of the training data", shown=numbers, further=further)
    report = say("step {step}: inf or nan; skipped {rows}", step=number, rows=named_rows)
    live.log.event("recovery", report, step=number, reason="not finite", rows=rows, report=report)
    if divergence.in_a_row >= MOST_IN_A_ROW:
        if live.state.step == live.last_good:  # No rate changes what the weights of the checkpoint give.
            if not live.has_saved:
                _refuse_model(live)
            _end_diverged(live, number)
        slow_down(live, number)
    elif outcome.has_changed_weights:
        live.roll_back(CHANGED)


def _refuse_model(live: LiveRun) -> NoReturn:
    """End a run whose model gives no finite numbers as it was loaded or drawn."""
    base = live.run.base
    what = say(
        "the losses of {most_in_a_row} batches in a row are inf or nan before a weight was changed",
        most_in_a_row=MOST_IN_A_ROW,
    )
    if live.controller.plan.choice.compute == "float16":
        raise UserError(
            "--mixed_precision = fp16, {what}: activations have left fp16's range; allowed: no, bf16; start "
            "again with --mixed_precision=bf16",
            what=what,
        )
    if base is None:
        raise UserError(
            "--learning_rate, does not matter: {what}; check --layer_norm_epsilon and --initializer_factor",
            what=what,
        )
    raise UserError(
        "--finetune_from = {base}, {what}: the outputs of this model are not finite; start from another one",
        base=base,
        what=what,
    )


def _end_diverged(live: LiveRun, number: int) -> NoReturn:
    """Publish what is good, and say what to change: no part of the learning rate has helped."""
    train = live.train
    last = live.checkpoints.named_best() or live.checkpoints.latest()
    ending = say("no model is published")
    if last is not None:
        ending = say("the model of the last good checkpoint is in {run_dir}", run_dir=live.run.run_dir)
        if live.is_main:
            publish(last, live.run.run_dir)
    advice = say("a longer --warmup_steps")
    if not train.max_grad_norm:
        advice = say("a longer --warmup_steps, or --max_grad_norm=1")
    factor = live.divergence.rate_factor
    slower = say(", also with {factor:g} of it", factor=factor) if factor < 1.0 else ""
    raise UserError(
        "--learning_rate = {learning_rate}, the run diverges at step {number}: its numbers become inf or "
        "nan{slower}; take a smaller one or auto, {others}; {ending}",
        learning_rate=train.learning_rate,
        number=number,
        slower=slower,
        others=advice,
        ending=ending,
    )
