"""A training run: set up, loop, finish.

`LowMemTrainer(config).train()` is all that a notebook needs; `train_low_mem.py train` is the same from a command line.
Accelerate provides launch, device placement and the process group; `engine/` computes the steps. Everything else that
the loop calls is in `training/`: `live` (the model, optimizer and progress of the run), `evaluating`, `saving`,
`recovering` and `recording`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

from data.prepare.preview import table_of_shards
from devices.environment import PRODUCT_CACHES, prepare_environment

# These variables must be set before torch is imported, as accelerate does below. A command line has set them already;
# for a notebook they are set here, which is too late if it has imported torch.
IS_UNBOUNDED = bool(PRODUCT_CACHES.keys() & prepare_environment().keys()) and "torch" in sys.modules

from accelerate import Accelerator, InitProcessGroupKwargs

import devices
from devices.malloc import tune_malloc
from engine.optimizers import Step
from engine.step import Done
from memory.budget import measure_budget
from memory.controller import MemoryController
from memory.step_settings import StepSettings
from settings.consistency import check
from settings.declared import Config
from settings.errors import refuse
from settings.fields import AUTO
from settings.loading import training_command
from settings.needs import unread
from support.language import say, speak
from support.storage import writing
from training.averaging import publish_mean
from training.checkpoints.runs import delete_replaced_run, publish, restore_replaced_run
from training.evaluating import evaluate, show_samples
from training.evaluation.scores import OwnMetric
from training.live import LiveRun
from training.processes.group import PATIENCE, Group
from training.processes.interrupts import Interrupts
from training.processes.launch import (
    foreign_engines,
    launch_problems,
    local_processes,
    local_rank,
    may_be_restarted,
    num_processes,
)
from training.recording import Recorder, announce
from training.recovering import give_up, recover, slow_down
from training.report.card import write_card
from training.report.endings import SAVE, STOP, Interrupted, StaysStopped
from training.report.history import plot
from training.report.run_log import Listener, RunLog
from training.report.summary import Summary, resume_command
from training.report.trackers import tracker_names, trackers
from training.saving import save
from training.setup.commit import headline
from training.setup.dpo_reference import attach_reference
from training.setup.hub import push
from training.setup.plan import plan_again
from training.setup.resolved import ResolvedRun
from training.setup.stages import PreparedRun, prepare_run, set_up

__all__ = ["LowMemTrainer", "plot"]
SHOWN_ROWS = 2  # Training examples that are shown when a run begins.
# Whether LowMemDataset reopens its files for every read: True, False or "auto" (below 13 GB available). Edit it here,
# as the guides say (`settings/edits.py` reads it); the flag --ultra_low_mem stands over it.
use_ultra_low_mem = "auto"


class Requests(NamedTuple):
    """What was requested of the run, on any process."""

    stops: bool  # A signal, the page or a callback asks to end the run.
    saves: bool  # The page or a callback asks for a checkpoint.
    is_exhausted: bool  # The memory controller has nothing left to reduce.
    stays_stopped: bool  # The page or a callback asks to end the run, so it must not be restarted.

    @property
    def ends_run(self) -> bool:
        """Whether this step is the last."""
        return self.stops or self.is_exhausted


class LowMemTrainer:
    """One training run inside its memory budget.

    Args:
        config: from `config.load("train", {...})`, or built by hand.
        callbacks: functions that are called on the main process with each event of the run, a dict as in a line of
            metrics.jsonl. One that returns "save" makes the run write a checkpoint after the current step; "stop" makes
            it save and end there.
        run: the run with its data prepared, from `prepare_run`; None: `train` prepares it.
        metrics: your own metrics, name -> function(answers, references). The function gets two lists of texts and
            returns a number, higher is better (for one that is best at 100, return `-abs(value - 100)`). Evaluations
            compute it on `eval_generate_rows` rows (auto: `eval_rows`), and `metric_for_best` may name it.
    """

    def __init__(
        self,
        config: Config,
        callbacks: Sequence[Listener] = (),
        run: PreparedRun | None = None,
        metrics: Mapping[str, OwnMetric] | None = None,
    ) -> None:
        if metrics and config.metrics.eval_generate_rows == AUTO:
            config = config.with_changes(eval_generate_rows=config.train.eval_rows)
            refuse(check(config))
        self.config = config
        self.callbacks = callbacks
        self.run = run
        self.metrics = metrics

    def train(self) -> Summary:
        """Train to the end.

        Returns:
            what was planned and measured.
        Raises:
            UserError: settings or data are wrong, and nothing was written; or the run is complete and saved, but the
                upload to the hub failed.
            DoesNotFit: no plan fits the budget.
            Interrupted: the run was stopped on request; it is saved and can be resumed.
        """
        config = self.config
        speak(config.run.language)
        refuse([*foreign_engines(), *launch_problems()])
        tune_malloc("small")  # The plan chooses later.
        # A run that was prepared may be a resumed one: its device and trackers are those that it had saved.
        run_config = config.run if self.run is None else self.run.data.config.run
        device = devices.pick(run_config.device, local_rank(), local_processes())
        self.accelerator = Accelerator(
            cpu=device.name == "cpu",
            kwargs_handlers=[InitProcessGroupKwargs(timeout=PATIENCE)],
            log_with=tracker_names(run_config.log_with) or None,
            project_dir=config.run.log_dir,
        )
        assert self.accelerator.num_processes >= num_processes(), "processes that know nothing of each other"
        with ExitStack() as resources:
            self.group = resources.enter_context(Group(self.accelerator))
            prepared = self.run or prepare_run(config, resources, self.group, self.metrics)
            run = set_up(prepared, self.group, device)
            if self.group.is_main:
                # Does nothing once `_begin` has deleted the run that this one replaces.
                resources.callback(restore_replaced_run, run.run_dir)
            self._begin(run, resources)
            with run.monitor.phase("train"):  # Evaluations and checkpoints are phases of their own inside it.
                self._loop()
            return self._finish()

    def _begin(self, run: ResolvedRun, resources: ExitStack) -> None:
        """Open the log, show the plan, build the model."""
        config = run.config
        plan = run.spec.plan
        values = config.as_dict()
        self.config = config
        # Read here, and not in the loop: `unread` below reports settings that nothing has read.
        self.weight_decay = config.train.weight_decay
        self.group.set_resume_command(resume_command(values))
        track = resources.enter_context(trackers(self.accelerator, config.run, values))
        self.log = log = resources.enter_context(
            RunLog(
                config.run,
                config.train,
                run.state.step,
                run.monitor,
                self.group.is_main,
                run.heartbeat,
                listeners=[track, *self.callbacks],
            )
        )
        for text in run.shown_notes:
            log.tell(text, is_shown=False)
        if IS_UNBOUNDED and run.device.name == "cpu":
            text = (
                "torch was imported before trainer_low_mem: its matrix-product caches may already be unbounded, and "
                "the run may exceed its budget; import trainer_low_mem first, in a fresh kernel"
            )
            log.tell(say(text))
        for text in (*run.notes, headline(run)):
            log.tell(text)
        if self.group.is_main and not config.train.is_keep_training:
            rows = table_of_shards(config.data, run.prepared, run.loader, run.tokenizer, SHOWN_ROWS)
            log.table(say("examples exactly as the model receives them"), rows)
        announce(log, config, plan, run.state.step, run.loader.num_rows, run.loader.reopens)
        controller = MemoryController(
            StepSettings.of(config),
            plan,
            run.budget,
            partial(plan_again, run),
            partial(measure_budget, config.memory.memory_budget, run.device, local_processes()),
            device=run.device,
            monitor=run.monitor,
            log=log,
            shape=say("{source} + {target} tokens", source=run.loader.longest[0], target=run.loader.longest[1]),
        )
        if run.task.has_reference(config.preference):
            with run.monitor.phase("reference"):
                attach_reference(run, log.tell)
        self.live = LiveRun(run, controller, log)
        resources.callback(lambda: self.live.close())
        if self.group.is_main:
            delete_replaced_run(run.run_dir)
        self.recorder = Recorder(self.live, plan)
        self.interrupts = resources.enter_context(Interrupts(self.group.is_main))
        self.stays_stopped = False
        for text in unread(config, training_command(values)):
            log.tell(text)
        log.start()
        run.threads.restart_measurement()

    def _loop(self) -> None:
        """All steps that are left, with the evaluations and checkpoints that are due after them."""
        live = self.live
        controller = live.controller
        schedule = live.run.spec.run_steps
        if live.state.step == 0:
            evaluate(live)
        while live.state.step < schedule.max_steps and not live.best.should_stop:
            controller.before_step(live.state.step, live.run.loader.num_rows)
            number = live.state.step + 1
            if not self._step(number):
                continue  # It is done again, or passed over, or the run is back at a checkpoint.
            if controller.after_step(number):
                live.follow_plan()
            requests = self._poll_requests()
            is_last = number == schedule.max_steps
            is_eval_due = is_last or number % schedule.eval_steps == 0
            is_best = is_eval_due and evaluate(live)
            ends = is_last or live.best.should_stop or requests.ends_run
            is_save_due = ends or is_best or requests.saves or number % schedule.save_steps == 0
            if is_save_due and not save(live, is_best):
                # The model is not finite. Go back to the last checkpoint, with a lower learning rate.
                slow_down(live, number)
                continue
            if requests.is_exhausted and not is_last:
                give_up(live)
            if requests.stops and not is_last:
                # torchrun restarts a run that ends with `Interrupted`, but not one that ends with `StaysStopped`.
                ending = StaysStopped if requests.stays_stopped and may_be_restarted() else Interrupted
                text = say(
                    "stopped after step {step}, saved in {folder}; continue with\n  {command}",
                    step=number,
                    folder=live.run.run_dir,
                    command=live.resume_command,
                )
                raise ending(text)
        for remark in live.best.remarks(live.state.step):
            self.log.tell(remark)

    def _step(self, number: int) -> bool:
        """One optimizer step.

        Returns:
            False if it ran out of memory or was not finite; `live.state.step` is then the step to continue from.
        """
        live = self.live
        start_time = time.perf_counter()
        rate = live.run.spec.run_steps.rate(number) * live.divergence.rate_factor
        batches = live.batches(number)
        labels, tokens = self.group.all_reduce_sum(
            sum(batch.num_labels for batch in batches), sum(batch.num_tokens for batch in batches)
        )
        step = Step(number, rate, self.weight_decay, live.output.seed)
        outcome = live.engine.step(step, batches, int(labels))
        if not isinstance(outcome, Done):
            # Measure and record the peak now: `recover` may change the plan that it is compared with.
            live.monitor.sample()
            self.recorder.note_peak(number)
            recover(live, outcome, number)
            return False
        live.applied(number, int(tokens))
        self.recorder.step(outcome, labels, rate, int(tokens), time.perf_counter() - start_time)
        return True

    def _poll_requests(self) -> Requests:
        """Requests of any process: for a checkpoint since the last call, for the end at any time.

        All processes call this together.
        """
        request = self.log.poll_request()
        if request == STOP:
            self.interrupts.stop()
            self.stays_stopped = True
        is_exhausted = self.live.controller.exhausted is not None
        # In the order of the fields of `Requests`:
        local = (self.interrupts.stop_requested, request == SAVE, is_exhausted, self.stays_stopped)
        return Requests(*(count > 0 for count in self.group.all_reduce_sum(*map(float, local))))

    def _finish(self) -> Summary:
        """Publish the best model, show samples and figures, upload the model."""
        live = self.live
        log = self.log
        run = live.run
        log.progress.stop()
        best = live.checkpoints.named_best() or live.checkpoints.latest()
        if live.is_main and best is not None:
            publish(best, run.run_dir)
        # The mean of the last checkpoints may be better. Where it was computed, `live` has the published weights.
        has_published_weights = not self._poll_requests().ends_run and publish_mean(live)
        prompt = self._show_samples(has_published_weights)
        log.memory(live.state.step, "end")
        live.monitor.stop()
        summary = self.recorder.end(prompt or "...")
        if live.is_main and best is not None:
            with writing("output_dir", live.output.output_dir):
                write_card(model=run.run_dir, folder=run.run_dir)
        self.group.wait()
        try:
            repository = live.output.push_to_hub
            if repository is not None and live.checkpoints.latest() is not None:
                address = self.group.run_on_main(lambda: push(repository, run.run_dir))
                log.tell(say("uploaded: {address}", address=address))
        finally:
            self.accelerator.end_training()
        return summary

    def _show_samples(self, has_published_weights: bool) -> str | None:
        """Show answers of the published model to validation rows, unless it cannot be loaded.

        Args:
            has_published_weights: whether `live` has its weights already, and not those of the last step.
        Returns:
            one of the prompts, as an example for the user; None: there is none.
        """
        live = self.live
        if live.train.sample_rows and not has_published_weights:
            # A run that is asked to end loads nothing: its samples are of the current weights.
            ends = self._poll_requests().ends_run
            if not ends and not live.take_published():
                return None
        if not live.is_main:
            return None
        live.controller.before("samples", live.state.step)
        with live.monitor.phase("samples"):
            return show_samples(live)
