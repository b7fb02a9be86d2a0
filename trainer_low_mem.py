"""A training run: set up, loop, finish.

`LowMemTrainer(config).train()` is all that a notebook needs; `train_low_mem.py train` is the same from a command line.
Accelerate gives launch, device placement and the process group; the loop of `engine/` does the rest. What a run does
beside its steps is in `training/`: `live` (what is trained, and how far), `evaluating`, `saving`, `recovering`,
`recording`.
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

# Whoever imports this file has no command line that would do this before accelerate imports torch.
IS_UNBOUNDED = bool(PRODUCT_CACHES.keys() & prepare_environment().keys()) and "torch" in sys.modules

from accelerate import Accelerator, InitProcessGroupKwargs

import devices
from common.language import say, speak
from common.storage import writing
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
SHOWN_ROWS = 2  # of the data, when a run begins
# Whether LowMemDataset reopens its files for every read: True, False or "auto" (below 13 GB available). Edit it here,
# as the guides say (`settings/edits.py` reads it); the flag --ultra_low_mem stands over it.
use_ultra_low_mem = "auto"


class Requests(NamedTuple):
    """What was requested of a run since its last step."""

    stops: bool  # A signal, the page or a callback has asked for the end.
    saves: bool
    is_exhausted: bool  # The memory controller has nothing left to reduce.
    stays_stopped: bool  # The page or a callback has asked for the end; a signal may mean one machine only.

    @property
    def ends_run(self) -> bool:
        """Whether this step is the last."""
        return self.stops or self.is_exhausted


class LowMemTrainer:
    """One training run inside its memory budget.

    Args:
        config: from `config.load("train", {...})`, or built by hand.
        callbacks: called on the main process with each event of the run, a dict as in a line of metrics.jsonl; one that
            returns "stop" ends the run behind its step, saved, and "save" has it write a checkpoint.
        run: the run with its rows prepared; None: that is still to come.
        metrics: of your own, name -> function(answers, references) of two lists of texts that gives a number, of which
            more is better (of one that is best at 100, give `-abs(value - 100)`): evaluations log it, of
            `eval_generate_rows` rows (auto: `eval_rows`), and `metric_for_best` may name it.
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
        """Run to the end.

        Returns:
            what was planned and measured.
        Raises:
            UserError: wrong settings or data, before anything is written; or, all being saved, the hub did not take the
                model. DoesNotFit: no plan fits the budget.
            Interrupted: stopped by a signal; saved, resumable.
        """
        config = self.config
        speak(config.run.language)
        refuse([*foreign_engines(), *launch_problems()])
        tune_malloc("small")  # The plan chooses later.
        # A run that goes on has the device and trackers that it has saved.
        output = config.run if self.run is None else self.run.data.config.run
        device = devices.pick(output.device, local_rank(), local_processes())
        self.accelerator = Accelerator(
            cpu=device.name == "cpu",
            kwargs_handlers=[InitProcessGroupKwargs(timeout=PATIENCE)],
            log_with=tracker_names(output.log_with) or None,
            project_dir=config.run.log_dir,
        )
        assert self.accelerator.num_processes >= num_processes(), "processes that know nothing of each other"
        with ExitStack() as resources:
            self.group = resources.enter_context(Group(self.accelerator))
            prepared = self.run or prepare_run(config, resources, self.group, self.metrics)
            run = set_up(prepared, self.group, device)
            if self.group.is_main:
                # Once the run has begun, the one that it replaces is deleted, and there is nothing to restore.
                resources.callback(restore_replaced_run, run.run_dir)
            self._begin(run, resources)
            with run.monitor.phase("train"):  # Evaluations and checkpoints are phases of their own inside it.
                self._loop()
            return self._finish()

    def _begin(self, run: ResolvedRun, resources: ExitStack) -> None:
        """Open the log, say what will be done, build the model."""
        config = run.config
        plan = run.spec.plan
        values = config.as_dict()
        self.config = config
        self.weight_decay = config.train.weight_decay  # A setting that is read later is noted as unread.
        self.group.resumes_by(resume_command(values))
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
        run.threads.look_anew()

    def _loop(self) -> None:
        live = self.live
        controller = live.controller
        steps = live.run.spec.run_steps
        if live.state.step == 0:
            evaluate(live)
        while live.state.step < steps.max_steps and not live.best.should_stop:
            controller.before_step(live.state.step, live.run.loader.num_rows)
            number = live.state.step + 1
            if not self._step(number):
                continue
            if controller.after_step(number):
                live.follow_plan()
            requests = self._poll_requests()
            is_last = number == steps.max_steps
            is_best = (is_last or number % steps.eval_steps == 0) and evaluate(live)
            ends = is_last or live.best.should_stop or requests.ends_run
            is_due = ends or is_best or requests.saves or number % steps.save_steps == 0
            if is_due and not save(live, is_best):
                slow_down(live, number)
                continue
            if requests.is_exhausted and not is_last:
                give_up(live)
            if requests.stops and not is_last:
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
        """One optimizer step. False: memory did not suffice, or it was not finite; the state says where to go on."""
        live = self.live
        began = time.perf_counter()
        rate = live.run.spec.run_steps.rate(number) * live.divergence.rate_factor
        batches = live.batches(number)
        labels, tokens = self.group.all_reduce_sum(
            sum(batch.num_labels for batch in batches), sum(batch.num_tokens for batch in batches)
        )
        step = Step(number, rate, self.weight_decay, live.output.seed)
        outcome = live.engine.step(step, batches, int(labels))
        if not isinstance(outcome, Done):
            live.monitor.sample()  # The memory of the failed step counts before the plan that follows.
            self.recorder.note_peak(number)
            recover(live, outcome, number)
            return False
        live.applied(number, int(tokens))
        self.recorder.step(outcome, labels, rate, int(tokens), time.perf_counter() - began)
        return True

    def _poll_requests(self) -> Requests:
        """What was requested since the last call, by any process; all processes call this together."""
        request = self.log.poll_request()
        if request == STOP:
            self.interrupts.stop()
            self.stays_stopped = True
        is_exhausted = self.live.controller.exhausted is not None
        here = (self.interrupts.stop_requested, request == SAVE, is_exhausted, self.stays_stopped)
        return Requests(*(count > 0 for count in self.group.all_reduce_sum(*map(float, here))))

    def _finish(self) -> Summary:
        live = self.live
        log = self.log
        run = live.run
        log.progress.stop()
        best = live.checkpoints.named_best() or live.checkpoints.latest()
        if live.is_main and best is not None:
            publish(best, run.run_dir)
        is_mean_live = not self._poll_requests().ends_run and publish_mean(live)
        prompt = self._show_samples(is_published=is_mean_live)
        log.memory(live.state.step, "end")
        live.monitor.stop()
        summary = self.recorder.end(prompt or "...")
        if live.is_main and best is not None:
            with writing("output_dir", live.output.output_dir):
                write_card(run.run_dir, run.run_dir)
        self.group.wait()
        try:
            repository = live.output.push_to_hub
            if repository is not None and live.checkpoints.latest() is not None:
                address = self.group.run_on_main(lambda: push(repository, run.run_dir))
                log.tell(say("uploaded: {address}", address=address))
        finally:
            self.accelerator.end_training()
        return summary

    def _show_samples(self, is_published: bool) -> str | None:
        """Show the published model's answers to held-out rows, where the live weights are published or can be; return a
        prompt.
        """
        live = self.live
        if live.train.sample_rows and not is_published:
            ends = self._poll_requests().ends_run
            if not ends and not live.take_published():
                return None
        if not live.is_main:
            return None
        live.controller.before("samples", live.state.step)
        with live.monitor.phase("samples"):
            return show_samples(live)
