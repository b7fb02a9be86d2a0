"""The model in training with its engine and state, and the way back to a checkpoint.

All that changes from step to step is here, and changes through this class alone; what evaluates, saves, measures and
recovers (`evaluating`, `saving`, `recording`, `recovering`) works on it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from data.batches.collate import Batch
from devices.malloc import tune_malloc
from memory.controller import MemoryController
from memory.step_settings import StepSettings
from settings.declared import GenerateConfig
from settings.errors import UserError, reason_of
from support.language import say
from training.checkpoints.folder import Checkpoints, step_of
from training.checkpoints.state import TrainingState
from training.divergence import Divergence
from training.evaluation.scores import metric_names
from training.evaluation.stopping import BestMetric
from training.report.run_log import RunLog
from training.report.summary import resume_command
from training.setup.build import build
from training.setup.data import rolled_back
from training.setup.resolved import ResolvedRun


class LiveRun:
    """A run while it trains.

    Raises:
        UserError: the checkpoint to start from is broken or of another shape.
    Memory: the weights and, resuming, the optimizer's state.
    """

    def __init__(self, run: ResolvedRun, controller: MemoryController, log: RunLog) -> None:
        config = run.config
        self.run = run
        self._beginning = run
        self.train = config.train
        self.metrics = config.metrics
        self.output = config.run
        self.shape = config.model
        self.num_answers = config.answer.num_answers
        self.score_names = metric_names(config.metrics.metrics, config.answer.num_answers)
        self.resume_command = resume_command(config.as_dict())
        self._cut = StepSettings.of(config).of_cut()
        self.device = run.device
        self.group = run.group
        self.task = run.task
        self.controller = controller
        self.monitor = run.monitor
        self.log = log
        self.checkpoints = Checkpoints(run.run_dir, self.train.keep_latest_n_ckp)
        self.is_main = run.group.is_main
        self.has_saved = False  # This start has not written a checkpoint yet.
        # The published model's answers are as long as it has been trained on, here or, as its base's folder says,
        # before.
        longest = run.loader.longest_answer
        if config.generate.max_new_tokens != GenerateConfig.max_new_tokens:
            longest = max(longest, config.generate.max_new_tokens)
        self.decoding = replace(config.generate, max_new_tokens=longest)
        self._request_ahead: dict[str, int] = {}
        self._batches_ahead: list[Batch] = []
        self._build()

    def _build(self) -> None:
        choice = self.controller.plan.choice
        budget = self.controller.budget
        train = self.train
        tune_malloc(choice.malloc)
        if budget.device_bytes is not None:
            self.device.limit_memory(budget.device_bytes)
        with self.monitor.phase("load"):
            self.engine = build(self.run, choice)
        if self.device.name != "cpu":  # While another device computes, the next rows are read.
            self.engine.before_wait = self.read_ahead
        self.state = self.run.state
        self.last_good = self.state.step  # The step of the checkpoint that can be gone back to, or of the beginning.
        self.divergence = Divergence(**(self.state.divergence or {}))
        self.best = BestMetric.restore(train.metric_for_best, train.early_stopping_evals, self.state.best_metric)
        self.controller.cleaner.settle()
        self.log.memory(self.state.step, "load")

    def follow_plan(self) -> None:
        """Let the engine work as the plan now says."""
        choice = self.controller.plan.choice
        tune_malloc(choice.malloc)
        self.engine.apply_plan(choice)
        # What the plan before had kept is given back, and is no peak of this one.
        if not self.device.is_separate_memory:
            self.monitor.watch(self.monitor.budget_bytes, from_now=True)

    def roll_back(self, reason: str) -> None:
        """Continue from the last checkpoint, or from the beginning: a step that has changed weights cannot be run
        again.
        """
        latest = self.group.broadcast(self.checkpoints.latest())
        self.run = rolled_back(self._beginning, latest, self.checkpoint_state())
        self.close()  # The disk has no room for two files of weights.
        del self.engine
        self.controller.before("rolling back", self.run.state.step)
        self._build()
        self.log.rewind(self.state.step)
        report = say("{reason}: continuing after step {step}", reason=reason, step=self.state.step)
        self.log.event("recovery", report, step=self.state.step, reason="rolled back", report=report)

    def release(self) -> None:
        """Let go of model, optimizer and engine, to make room for what `take` brings."""
        self.state = self.checkpoint_state()
        self.close()
        del self.engine
        self.controller.before("averaging", self.state.step)

    def take(self, folder: Path) -> None:
        """Go on with the weights of another folder, without anything that the optimizer has learnt: to evaluate
        them.
        """
        self.run = self._beginning.starting_from(folder, self.state, is_resumed=False)
        self._build()

    def take_published(self) -> bool:
        """Go on with the weights that are published, where the run has gone past them: to show what they write. False:
        they cannot be had any more, as where an adapter's base is gone by now; the run is done all the same, and has no
        weights.
        """
        best = self.group.run_on_main(lambda: self.checkpoints.named_best() or self.checkpoints.latest())
        # Machines need not share a disk.
        (is_readable,) = self.group.all_reduce_min(float(best is not None and best.is_dir()))
        if best is None or not is_readable or step_of(best) == self.state.step:
            return True
        try:
            self.release()
            self.take(best)
        except Exception as error:
            if not isinstance(error, (UserError, OSError)) and not self.device.is_out_of_memory(error):
                raise
            self.log.tell(say("no samples: {reason}", reason=reason_of(error)))
            return False
        return True

    def close(self) -> None:
        """Give back what is held outside of memory, where there is an engine: one may have failed to be built again."""
        if hasattr(self, "engine"):
            self.engine.blockwise.weight_store.close()

    def batches(self, number: int) -> list[Batch]:
        """The micro-batches that this process reads in a step, counted from 1."""
        request = self._request(number)
        if self._request_ahead == request:
            return self._batches_ahead
        return self.run.loader.micro_batches(**request)

    def _request(self, number: int) -> dict[str, int]:
        plan = self.controller.plan
        return {
            "step": self.divergence.batch_of(number),
            "effective_batch_size": plan.effective_batch_size,
            "batch_size": plan.choice.batch_size_per_gpu,
            "rank": self.group.rank,
            "num_processes": self.group.size,
        }

    def read_ahead(self) -> None:
        """Read the rows of the step after the present one. Those that cannot be read are refused in their own step."""
        request = self._request(self.state.step + 2)
        with suppress(Exception):
            self._batches_ahead = self.run.loader.micro_batches(**request)
            self._request_ahead = request

    # --- how far it is ---

    def checkpoint_state(self) -> TrainingState:
        """What a checkpoint written now keeps of the run."""
        scaling = self.engine.update.scaling
        return replace(
            self.state,
            choice=asdict(self.engine.plan),
            asked=self._cut,
            loss_scaling=None if scaling is None else scaling.as_dict(),
            divergence=None if self.divergence == Divergence() else asdict(self.divergence),
        )

    def applied(self, number: int, tokens: int) -> None:
        """A step is done that has read so many tokens, on all processes."""
        self.divergence.applied(number)
        self.state = replace(self.state, step=number, tokens=self.state.tokens + tokens)

    def evaluated(self, loss: float, values: Mapping[str, float], is_mean: bool = False) -> bool:
        """An evaluation is done; returns whether it is the best so far.

        Args:
            values: its numbers by name, as the run log tells them; the metric that counts is among them.
            is_mean: they are of a mean of checkpoints, which is published only where it is the best.
        """
        is_best = self.best.is_best(self.state.step, values)
        state = replace(self.state, best_metric=self.best.state())
        if state.first_eval_loss is None:
            state = replace(state, first_eval_loss=loss)
        if math.isfinite(loss) and (state.best_eval_loss is None or loss < state.best_eval_loss):
            state = replace(state, best_eval_loss=loss)
        if is_best or (self.best.step == 0 and not is_mean):
            state = replace(state, best_evaluation={"step": state.step, **values})
        self.state = state
        return is_best
