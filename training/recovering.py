"""What does a run do after a step that was not applied? It takes a smaller way, passes over rows, slows down, or ends.

Short of memory: a smaller way, the same rows again. Not finite: past the rows; after several in a row, from the last
checkpoint with half the learning rate. Where weights were changed already, both go back to the last checkpoint first.
Every process comes here together, and decides the same.
"""

from __future__ import annotations

import math
from typing import NoReturn

from config import DoesNotFit, UserError
from engine.finite import is_finite
from engine.step import Outcome
from language import say
from training.budget.keeping import ADVICE, NOTHING_LEFT
from training.checkpoints.runs import publish
from training.divergence import why_diverged, why_hopeless
from training.live import LiveRun
from training.report.results import named_rows
from training.report.summary import resume_command
from training.saving import Saver

CHANGED = "weights were changed already"


class Recovery:
    """The way on after a failed step, or the end.

    Args:
        live: the run. saver: writes what is good before it ends.
    """

    def __init__(self, live: LiveRun, saver: Saver) -> None:
        self.live, self.saver = live, saver

    def after_step(self, outcome: Outcome, number: int) -> None:
        """Go on after step `number`, which memory did not suffice for, or which was not finite."""
        if outcome.is_out_of_memory:
            self._after_out_of_memory(outcome, number)
        else:
            self._leave_out(number, outcome)

    def after_unsound(self, number: int) -> None:
        """Go on after step `number`, whose weights are not finite and were not saved."""
        earlier = self.live.engine.checks.earlier  # on a GPU the next step would have looked at it
        is_lost = earlier is not None and not is_finite([earlier])
        if self.live.group.all_reduce_sum(float(is_lost))[0]:
            self._leave_out(number + 1, Outcome(math.nan, False, is_finite=False, is_changed=True, is_late=True))
        else:
            self.slow_down(number)

    def slow_down(self, number: int) -> None:
        """Continue from the last checkpoint with half the learning rate; where that was done often enough, end the run."""
        divergence = self.live.divergence
        if not divergence.slow_down():
            self._end_diverged(number)
        self.live.roll_back(f"step {number} is not finite: the learning rate is now {divergence.rate_factor:g} of it")

    def give_up(self) -> NoReturn:
        """End a run for which nothing is left to shrink.

        Raises:
            DoesNotFit: always; it says what helps.
        """
        live = self.live
        told = live.keeper.exhausted or say("another process has nothing left to shrink")
        if live.checkpoints.latest():
            told = say(
                "{story}; step {step} is saved in {folder}, and continues by\n  {command}",
                story=told, step=live.last_good, folder=live.start.run_dir, command=resume_command(live.config),
            )  # fmt: skip
        raise DoesNotFit(told)

    def end_sharded(self, error: Exception) -> None:
        """End a run with sharded weights that memory did not suffice for: the other processes stand in a collective by then.

        Raises:
            DoesNotFit: it was that; another error stays what it is.
        """
        live = self.live
        if live.engine.shards is None or not live.device.is_out_of_memory(error):
            return
        story = say("out of memory at step {step}, where weights are sharded", step=live.state.step + 1)
        live.keeper.exhausted = say(NOTHING_LEFT, story=story, advice=say(ADVICE))
        self.give_up()

    def _after_out_of_memory(self, outcome: Outcome, number: int) -> None:
        """The error came here or on another process: a smaller way there, the same rows again on all."""
        live = self.live
        if outcome.failure is not None:
            live.keeper.after_out_of_memory(outcome.failure, number)
        (exhausted,) = live.group.all_reduce_sum(float(live.keeper.exhausted is not None))
        if exhausted:
            if not outcome.is_changed:
                self.saver.save(is_best=False)
            self.give_up()
        if outcome.is_changed:
            live.roll_back(CHANGED)
        else:
            live.follow_plan()

    def _leave_out(self, number: int, outcome: Outcome) -> None:
        """After a step that was not finite on any process: past its rows; where weights suffered, back to a checkpoint."""
        live, divergence, is_changed = self.live, self.live.divergence, outcome.is_changed
        is_before = outcome.is_late and live.last_good < number - 1  # what was saved since was looked at, and sound
        to_blame = number - is_before
        divergence.skip(to_blame, seen_at=number)
        rows = divergence.rows(live.start.loader, live.keeper.plan.effective_batch_size)
        where = live.group.first_of(live.engine.checks.first)
        values = {"step": to_blame, "rows": named_rows(rows)}
        report = say("step {step}: inf or nan; left out {rows}", **values)
        if where:
            report = say("step {step}: inf or nan, first in {place}; left out {rows}", place=where, **values)
        live.log.event("recovery", report, step=to_blame, reason="not finite", rows=rows, place=where, report=report)
        if divergence.is_stuck and not is_changed and live.state.step == live.last_good:
            self._end_diverged(number, is_hopeless=True)  # no rate changes what the weights there are give
        if divergence.is_stuck:
            self.slow_down(number)
        elif is_changed:
            live.roll_back(CHANGED)

    def _end_diverged(self, number: int, is_hopeless: bool = False) -> NoReturn:
        """Publish what is good, and say what to change."""
        live = self.live
        last = live.checkpoints.named_best() or live.checkpoints.latest()
        if is_hopeless and not live.has_saved:
            raise UserError(why_hopeless(live.start.base, live.keeper.plan.choice.compute))
        if last is not None and live.is_main:
            publish(last, live.start.run_dir)
        rate, folder = live.config.train.learning_rate, last and live.start.run_dir
        raise UserError(
            why_diverged(rate, live.config.train.max_grad_norm, number, live.divergence.rate_factor, folder)
        )
