"""How does a training run go? decide -> plan -> build -> loop -> summary.

`LowMemTrainer(config).train()` is all that a notebook needs; `train_low_mem.py train` is the same from a command line.
Accelerate gives launch, device placement and the process group; the walk of `engine/` does the rest.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from typing import NoReturn

import torch
from accelerate import Accelerator

import devices
from config import Config, DoesNotFit, UserError
from data.collate import Batch
from devices.malloc import tune_malloc
from engine.anomaly import checks_of
from engine.finite import NotFinite
from engine.micro_batches import MicroBatch, to_micro_batch
from engine.optimizers import Step
from engine.reduce import Reducer, StepFailed
from memory.monitor import Monitor
from memory.recovery import drop_frames
from settings import AUTO, counted
from training.building import build
from training.checkpoints import Checkpoints
from training.divergence import Divergence, why_diverged, why_hopeless
from training.evaluation import evaluate_in_budget, mean_metrics
from training.interrupts import Interrupted, Interrupts
from training.journal import Journal
from training.keeping import Keeper
from training.launch import local_processes, local_rank
from training.opening import agree_on_kernels, agreed_budget, open_run
from training.ownership import Ownership
from training.peers import Peers
from training.preference import is_preference_run
from training.processes import agree_on, first_told, group_settings, sum_over
from training.progress import Reading
from training.reference import attach_reference
from training.report import Summary
from training.runs import publish
from training.samples import score_answers, show_samples
from training.saving import is_sound, save
from training.schedules import planned_rate
from training.startup import rolled_back
from training.stopping import BestMetric, lowest_of


class LowMemTrainer:
    """One training run inside its memory budget.

    Args:
        config: from `config.load("train", {...})`, or built by hand.
    """

    def __init__(self, config: Config) -> None:
        self.config = config

    def train(self) -> Summary:
        """Run to the end.

        Returns:
            what was planned and measured.
        Raises:
            UserError: wrong settings or data, before anything is written. DoesNotFit: no plan fits the budget.
            Interrupted: stopped by a signal; saved, resumable.
        """
        tune_malloc("small")  # until the plan has chosen
        self.device = devices.pick(self.config.run.device, local_rank())
        self.accelerator = Accelerator(cpu=self.device.name == "cpu", kwargs_handlers=[group_settings()])
        if self.config.run.num_threads != AUTO:
            torch.set_num_threads(int(self.config.run.num_threads))
        self.is_main = self.accelerator.is_main_process
        with ExitStack() as stack:
            stack.enter_context(Peers(self.accelerator.process_index, self.accelerator.num_processes))
            self._open(stack)
            self._build()
            self.interrupts = stack.enter_context(Interrupts(self.is_main))
            stack.enter_context(self.journal)
            self._loop()
            self.journal.progress.stop()
            return self._finish()

    # --- before the first step ---

    def _open(self, stack: ExitStack) -> None:
        """Settle data, base, plan and run folder, and tell what will be done."""
        agree_on_kernels(self.config, self.accelerator)
        budget = agreed_budget(self.config, self.device, self.accelerator)
        seconds = self.config.memory.monitor_seconds
        self.monitor = stack.enter_context(
            Monitor(budget.host_bytes, self.device, seconds, device_budget_bytes=budget.device_bytes)
        )
        owner = stack.enter_context(Ownership())
        opening = open_run(self.config, budget, self.device, self.accelerator, self.monitor, owner)
        self.start = self.beginning = opening.start
        self.config = config = opening.start.config
        self.mirror, plan = opening.mirror, opening.plan
        self.planned_peak_bytes = plan.peak_bytes
        self.checkpoints = Checkpoints(self.start.run_dir, config.train.keep_latest_n_ckp, self.is_main)
        self.journal = Journal(config, self.start.state.step, self.monitor, self.is_main)
        for text in (*budget.warnings, *self.start.notes):
            self.journal.tell(text)
        self.journal.tell(
            f"{config.run.run_name}: {counted(self.start.loader.num_rows, 'row')} ({self.start.prepared.objective}), "
            f"{counted(int(config.train.max_steps), 'step')}, {self.device.describe()}, "
            f"{counted(self.accelerator.num_processes, 'process')}; {budget.describe()}"
        )
        self.journal.begin(config, plan, self.start.state.step)
        self.keeper = Keeper(
            config, plan, budget, opening.plan_again, device=self.device, monitor=self.monitor, journal=self.journal,
            shape="{} + {} tokens".format(*self.start.loader.longest), local_processes=local_processes(),
        )  # fmt: skip
        if is_preference_run(config):
            with self.monitor.phase("reference"):
                attach_reference(
                    self.start, plan.choice, self.device, self.accelerator, plan.effective_batch_size, self.journal.tell
                )

    def _build(self) -> None:
        """Make model and engine, load what the run starts from, and get ready to watch."""
        choice, budget = self.keeper.plan.choice, self.keeper.budget
        tune_malloc(choice.malloc)
        if budget.device_bytes is not None:
            self.device.limit_memory(budget.device_bytes)
        with self.monitor.phase("load"):
            self.engine = build(self.start, choice, self.device)
        self.walk, self.update = self.engine.walk, self.engine.update
        self.reducer = Reducer(self.update.ready, self.accelerator.num_processes, self.engine.shards)
        self.state = replace(self.start.state, choice=choice.as_dict())
        self.last_good = self.state.step
        self.divergence = Divergence.restore(self.state.divergence)
        self.checks = checks_of(self.engine.model, self.engine.shards, self.config.train.detect_anomaly)
        self.walk.check_loss = self.checks.loss
        train = self.config.train
        self.best = BestMetric.restore(train.metric_for_best, train.early_stopping_evals, self.state.best_metric)
        self.keeper.cleaner.settle()
        self.journal.memory(self.state.step, "load")

    # --- the loop ---

    def _loop(self) -> None:
        train = self.config.train
        max_steps = int(train.max_steps)
        self._loop_seconds, self._loop_tokens, self.has_saved, self.save_asked = 0.0, 0, False, False
        if self.state.step == 0:
            self._evaluate()
        while self.state.step < max_steps and not self.best.should_stop:
            self._clean_before_epoch()
            number = self.state.step + 1
            with self.monitor.phase("train"):
                if not self._step(number):
                    continue
            self.state.step = number
            if self.keeper.after_step(number):
                self._follow_plan()
            stop, exhausted = self._stop_asked()
            is_last = number == max_steps
            is_best = (number % int(train.eval_steps) == 0 or is_last) and self._evaluate()
            is_due = number % int(train.save_steps) == 0 or is_last or is_best or stop or self.best.should_stop
            if (is_due or self.save_asked) and not self._save(is_best):
                self._slow_down(number)
                continue
            if exhausted and not is_last:
                self._give_up()
            if stop and not is_last:
                raise Interrupted(
                    f"stopped after step {number}, saved in {self.start.run_dir}; continue with --is_keep_training=True"
                )
        for remark in self.best.remarks(self.state.step):
            self.journal.tell(remark)

    def _step(self, number: int) -> bool:
        """One optimizer step. False: memory did not suffice, or it was not finite; the state says where to go on."""
        began = time.perf_counter()
        rate = planned_rate(number, self.config.train) * self.divergence.rate_factor
        batches = self._micro_batches(number)
        labels, tokens = sum_over(
            self.accelerator, sum(b.num_labels for b in batches), sum(b.num_tokens for b in batches)
        )
        failure, loss, is_lost = None, 0.0, False
        try:
            self.update.begin(Step(number, rate, self.config.train.weight_decay, self.config.run.seed))
            loss = self._attempt(batches, int(labels))
            is_lost = not self.update.is_finite
        except StepFailed:
            pass  # the sum below says so as well
        except Exception as error:
            is_lost = isinstance(error, NotFinite)
            if not is_lost and (not self.device.is_out_of_memory(error) or self.engine.shards is not None):
                raise
            self._abandon(error)
            failure = None if is_lost else error
        loss, failed, begun, lost = sum_over(
            self.accelerator, loss, float(failure is not None), float(self.update.has_begun), float(is_lost)
        )
        if failed or lost:
            self.walk.model.zero_grad()
            (self._recover(failure, number, begun > 0) if failed else self._leave_out(number, begun > 0))
            return False
        self.divergence.applied(number)
        self._record_step(number, loss, labels, rate, int(tokens), time.perf_counter() - began)
        return True

    def _attempt(self, batches: list[Batch], labels: int) -> float:
        """Gradients and update; returns the summed loss."""
        self.walk.objective.clear()
        micro_batches = [self._to_micro_batch(batch) for batch in batches]
        self.checks.begin()
        on_ready = self.checks.watching(self.reducer.ready)
        total = self.engine.gradients(micro_batches, labels, self.keeper.plan.choice.accumulation_passes, on_ready)
        self.reducer.finish()
        self.update.finish()
        return float(total)

    def _abandon(self, error: Exception) -> None:
        """Free an aborted step; the other processes stop at the same place. Sharded ones all stop by themselves."""
        drop_frames(error)
        if self.engine.shards is None:
            self.reducer.abandon(self.walk.hand_over_order(), self.walk.zero_gradients)

    def _micro_batches(self, number: int) -> list[Batch]:
        return self.start.loader.micro_batches(
            self.divergence.batch_of(number), effective_batch_size=self.keeper.plan.effective_batch_size,
            batch_size=self.keeper.plan.choice.batch_size_per_gpu,
            rank=self.accelerator.process_index, num_processes=self.accelerator.num_processes,
        )  # fmt: skip

    def _to_micro_batch(self, batch: Batch) -> MicroBatch:
        pad_token_id = self.walk.model.config.pad_token_id
        return to_micro_batch(batch, pad_token_id, self.device.torch_device, self.keeper.plan.choice.sizes)

    def _record_step(self, number: int, loss: float, labels: float, rate: float, tokens: int, seconds: float) -> None:
        self.state.tokens += tokens
        self._loop_seconds += seconds
        self._loop_tokens += tokens
        now, plan = self.monitor.sample("train"), self.keeper.plan
        used = now.device_bytes if self.device.is_separate_memory else now.anon_bytes
        figures = mean_metrics(self.walk.objective, labels, self.accelerator)
        if self.update.is_skipped and self.update.scaling is not None:
            figures["skipped_at_loss_scale"] = self.update.scaling.scale
        reading = Reading(
            number, loss / max(labels, 1), rate, tokens / seconds, used, self._measured_peak(), plan.budget_bytes
        )  # fmt: skip
        self.journal.step(reading, tokens, seconds, plan.choice, figures)

    # --- when memory does not suffice ---

    def _recover(self, failure: Exception | None, number: int, is_changed: bool) -> None:
        """After an out-of-memory error, here or (None) on another rank: a smaller way there, the same rows again on all."""
        if failure is not None:
            self.keeper.after_out_of_memory(failure, "train", number)
        _, exhausted = self._stop_asked()
        if exhausted:
            if not is_changed:
                self._save(is_best=False)
            self._give_up()
        if is_changed:
            self._roll_back("weights were changed already")
        else:
            self._follow_plan()

    def _leave_out(self, number: int, is_changed: bool) -> None:
        """After a step that was not finite on any rank: past its rows; where weights suffered, back to a checkpoint."""
        self.divergence.skip(number)
        rows = self.divergence.rows(self.start.loader, self.keeper.plan.effective_batch_size)
        self.journal.left_out(number, rows, first_told(self.accelerator, self.checks.first))
        if self.divergence.is_stuck and not is_changed and self.state.step == self.last_good:
            self._end_diverged(number, is_hopeless=True)  # no rate changes what the weights there are give
        if self.divergence.is_stuck:
            self._slow_down(number)
        elif is_changed:
            self._roll_back("weights were changed already")

    def _slow_down(self, number: int) -> None:
        """Continue from the last checkpoint with half the learning rate; where that was done often enough, end the run."""
        if not self.divergence.slow_down():
            self._end_diverged(number)
        self._roll_back(f"step {number} is not finite: the learning rate is now {self.divergence.rate_factor:g} of it")

    def _end_diverged(self, number: int, is_hopeless: bool = False) -> NoReturn:
        """Publish what is good, and say what to change."""
        last = self.checkpoints.best() or self.checkpoints.latest()
        if is_hopeless and not self.has_saved:
            raise UserError(why_hopeless(self.start.base, self.keeper.plan.choice.compute))
        if last is not None:
            publish(last, self.start.run_dir, self.is_main)
        rate, folder = self.config.train.learning_rate, last and self.start.run_dir
        raise UserError(why_diverged(rate, number, self.divergence.rate_factor, folder))

    def _roll_back(self, reason: str) -> None:
        """Continue from the last checkpoint, or from the beginning: a step that has changed weights cannot be run again."""
        latest = agree_on(self.accelerator, self.checkpoints.latest())
        self.state.divergence = self.divergence.state()
        self.start = rolled_back(self.beginning, latest, self.state)
        del self.engine, self.walk, self.update, self.reducer
        self.keeper.before("rolling back", self.start.state.step)
        self._build()
        self.journal.rolled_back(self.state.step, reason)

    def _follow_plan(self) -> None:
        """Let the engine work as the plan now says."""
        choice = self.keeper.plan.choice
        tune_malloc(choice.malloc)
        self.engine.follow(choice)
        self.state.choice = choice.as_dict()

    def _stop_asked(self) -> tuple[bool, bool]:
        """Whether any process was asked to stop, and whether any has nothing left to shrink."""
        stop, save_now = self.interrupts.hear(self.journal.wish())
        stop, save_now, exhausted = sum_over(self.accelerator, stop, save_now, float(self.keeper.exhausted is not None))
        self.save_asked |= save_now > 0
        return stop + exhausted > 0, exhausted > 0

    def _give_up(self) -> NoReturn:
        resume = f"; step {self.last_good} is saved in {self.start.run_dir}" if self.checkpoints.latest() else ""
        raise DoesNotFit((self.keeper.exhausted or "another process has nothing left to shrink") + resume)

    # --- around the step ---

    def _clean_before_epoch(self) -> None:
        rows, batch = self.start.loader.num_rows, self.keeper.plan.effective_batch_size
        done = self.state.step * batch
        if self.state.step and done // rows > (done - batch) // rows:
            self.keeper.before("epoch", self.state.step)

    def _evaluate(self) -> bool:
        """Measure the loss on held-out rows, and answers where asked for; returns whether it is the best so far."""
        self.keeper.before("evaluation", self.state.step)
        with self.monitor.phase("evaluation"):
            result = evaluate_in_budget(
                self.walk, self.start, self.accelerator, self.device, self.keeper, self.state.step
            )
            if result is None:
                self._give_up()
            free = self.keeper.plan.budget_bytes - self.monitor.sample().anon_bytes
            scores, samples = score_answers(
                self.walk, self.start.validation, self.start.tokenizer, self.config, self.accelerator, free
            )
        if not result.tokens:
            return False
        self.state.best_eval_loss = lowest_of(self.state.best_eval_loss, result.loss)
        if self.state.first_eval_loss is None:
            self.state.first_eval_loss = result.loss
        is_best = self.best.is_best(self.state.step, {"loss": result.loss, **scores})
        self.state.best_metric = self.best.state()
        self.journal.evaluation(self.state.step, result, {**result.metrics, **scores}, samples)
        return is_best

    def _save(self, is_best: bool) -> bool:
        """Write a checkpoint, and copy it where a mirror is named; False: the model is not finite, nothing was written."""
        with self.monitor.phase("evaluation"):
            micro_batches = [self._to_micro_batch(batch) for batch in self._micro_batches(max(self.state.step, 1))[:1]]
            if not is_sound(self.engine, micro_batches, self.accelerator):
                return False
        self.state.loss_scaling, self.state.divergence = self.engine.loss_scaling, self.divergence.state()
        with self.monitor.phase("save"):
            path = save(self.checkpoints, self.engine, self.start.tokenizer, self.state, is_best)
        self.journal.checkpoint(self.state.step, path, is_best)
        if self.mirror is not None and self.is_main:
            problem = self.mirror.push(self.start.run_dir, path)
            if problem is not None:
                self.journal.tell(problem)
        self.last_good, self.has_saved, self.save_asked = self.state.step, True, False
        return True

    def _finish(self) -> Summary:
        """Publish the best model, show samples and the summary."""
        run_dir, journal = self.start.run_dir, self.journal
        best = self.checkpoints.best() or self.checkpoints.latest()
        prompt = None
        if self.is_main and best is not None:
            publish(best, run_dir)
        if self.is_main and self.engine.shards is None:  # no process could write alone
            with self.monitor.phase("samples"):
                prompt = show_samples(
                    self.walk, self.start.validation, self.start.tokenizer, self.config.train.sample_rows,
                    journal.progress, journal.metrics,
                )  # fmt: skip
        journal.memory(self.state.step, "end")
        self.monitor.stop()
        summary = Summary(
            steps=self.state.step, seconds=self._loop_seconds, tokens_per_second=self._loop_tokens / max(self._loop_seconds, 1e-9),
            first_eval_loss=self.state.first_eval_loss, best_eval_loss=self.state.best_eval_loss,
            planned_peak_bytes=self.planned_peak_bytes, measured_peak_bytes=self._measured_peak(),
            budget_bytes=self.keeper.plan.budget_bytes, phase_peaks=dict(self.monitor.phase_peaks),
            care_seconds=self.monitor.cost_seconds + self.keeper.cleaner.total_seconds,
            watched_seconds=self.monitor.watched_seconds(), model_dir=str(run_dir), **self.divergence.figures(),
        )  # fmt: skip
        journal.end(summary, self.config, prompt or "...")
        self.accelerator.wait_for_everyone()
        self.accelerator.end_training()
        return summary

    def _measured_peak(self) -> int:
        return self.device.memory_peak_bytes() if self.device.is_separate_memory else self.monitor.peak_bytes
