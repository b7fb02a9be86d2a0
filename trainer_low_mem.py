"""How does a training run go? decide -> plan -> build -> loop -> summary.

`LowMemTrainer(config).train()` is all that a notebook needs; `train_low_mem.py train` is the same from a command line.
Accelerate gives launch, device placement and the process group; the walk of `engine/` does the rest.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from dataclasses import asdict, replace

import torch
from accelerate import Accelerator
from loguru import logger

import devices
from config import Config, DoesNotFit
from data.collate import Batch
from devices.malloc import tune_malloc
from engine.optimizers import Step
from engine.reduce import Reducer
from engine.slices import Slice, to_slice
from memory.budget import measure_budget
from memory.cleanup import Cleaner, CleanupRecord
from memory.monitor import Monitor
from memory.prediction import Choice, weight_counts
from memory.recovery import Recovery
from settings import AUTO, UserError
from training.building import build
from training.checkpoints import Checkpoints
from training.evaluation import evaluate
from training.interrupts import Interrupted, Interrupts
from training.planning import make_plan
from training.processes import agree_on, sum_over
from training.progress import Progress, Reading
from training.report import Summary, next_commands, plan_rows, summary_rows
from training.runs import check_new_run, check_writable, create_run, new_run_name, publish, resume_run
from training.samples import show_samples
from training.schedules import learning_rate
from training.startup import SETTINGS_FILE, resolve_schedule, start
from training.state import write_checkpoint
from training.tracking import MetricsFile, open_log

PRESSURE = 0.97  # share of the budget in use from which memory is cleaned at once


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
        self.device = devices.pick(self.config.run.device, _local_rank())
        self.accelerator = Accelerator(cpu=self.device.name == "cpu")
        if self.config.run.num_threads != AUTO:
            torch.set_num_threads(int(self.config.run.num_threads))
        self.is_main = self.accelerator.is_main_process
        with ExitStack() as stack:
            self._decide(stack)
            self._build()
            self.interrupts = stack.enter_context(Interrupts(self.is_main))
            stack.enter_context(self.progress)
            self._loop()
            self.progress.stop()
            return self._finish()

    # --- before the first step ---

    def _decide(self, stack: ExitStack) -> None:
        """Settle data, base, plan and run folder; everything that can be refused is refused here."""
        config = self.config
        self.budget = measure_budget(config.memory.memory_budget, self.device, _local_processes())
        self.monitor = stack.enter_context(Monitor(self.budget.host_bytes, self.device, config.memory.monitor_seconds))
        name = config.run.run_name if config.run.run_name != AUTO else new_run_name(_kind(config))
        name = agree_on(self.accelerator, name)
        _refuse(check_writable("log_dir", config.run.log_dir))
        if not config.train.is_keep_training:
            config.run.run_name = name
            _refuse(check_new_run(config.run.output_dir, name, config.run.overwrite))
        with self.monitor.phase("prepare"):
            self.start = start(config, self.budget.available_bytes)
        self.config = config = self.start.config
        base = self.monitor.sample().anon_bytes
        processes = self.accelerator.num_processes
        self.plan = agree_on(self.accelerator, make_plan(self.start, self.device, self.budget, base, processes))
        resolve_schedule(config, self.plan.effective_batch_size, self.start.loader.num_rows)
        _refuse(self._batch_problems())
        self._open_run()

    def _batch_problems(self) -> list[str]:
        rows, processes = self.plan.effective_batch_size, self.accelerator.num_processes
        if rows < processes:
            return [
                f"--effective_batch_size = {rows}, is less than one row for each of {processes} processes; raise it"
            ]
        return []

    def _open_run(self) -> None:
        """Create or reopen the run's folder, log and metrics, and tell what will be done."""
        config, begin = self.config, self.start
        train, name = config.train, config.run.run_name
        if train.is_keep_training:
            resume_run(begin.run_dir, self.is_main)
        else:
            create_run(config.run.output_dir, name, _kind(config), overwrite=config.run.overwrite, is_main=self.is_main)
        if self.is_main:
            config.save(begin.run_dir / SETTINGS_FILE)
        max_steps = int(train.max_steps)
        self.progress = Progress(max_steps, self.is_main, train.log_steps, start_step=begin.state.step)
        open_log(config.run.log_dir, name, self.is_main, console=self.progress.note)
        self.metrics = MetricsFile(f"{config.run.log_dir}/{name}/metrics.jsonl", train.is_keep_training, self.is_main)
        if train.is_keep_training:
            self.metrics.truncate_after(begin.state.step)
        self.monitor.on_record = lambda record: self.metrics.write("memory", **record)
        self.checkpoints = Checkpoints(begin.run_dir, train.keep_latest_n_ckp, self.is_main)
        for text in (*self.budget.warnings, *begin.notes):
            self._tell(text)
        self.metrics.write("start", step=begin.state.step, run_name=name, settings=config.as_dict())
        self.metrics.write("plan", **self.plan.as_dict())
        self._tell(
            f"{name}: {begin.loader.num_rows:,} rows ({begin.prepared.objective}), {max_steps} steps, "
            f"{self.device.describe()}, {self.accelerator.num_processes} process(es); {self.budget.describe()}"
        )
        self.progress.table("plan", plan_rows(self.plan, weight_counts(config.model)["total"]))

    def _build(self) -> None:
        """Make model and engine, load what the run starts from, and get ready to watch."""
        tune_malloc(self.plan.choice.malloc)
        with self.monitor.phase("load"):
            engine = build(self.start, self.plan.choice, self.device)
        self.model, self.optimizer, self.walk, self.update = engine.model, engine.optimizer, engine.walk, engine.update
        self.reducer = Reducer(self.update.ready, self.accelerator.num_processes)
        memory = self.config.memory
        self.cleaner = Cleaner(self.device, memory.light_clean_steps, memory.full_clean_steps)
        self.recovery = Recovery(self.device)
        self.state = replace(self.start.state, choice=asdict(self.plan.choice))
        self.cleaner.settle()
        self._record_memory("load")

    # --- the loop ---

    def _loop(self) -> None:
        train = self.config.train
        max_steps = int(train.max_steps)
        self._first_eval_loss: float | None = None
        self._loop_seconds, self._loop_tokens = 0.0, 0
        rows_per_epoch = self.start.loader.num_rows
        if self.state.step == 0:
            self._evaluate()
        while self.state.step < max_steps:
            done = self.state.step * self.plan.effective_batch_size
            if self.state.step and done // rows_per_epoch > (done - self.plan.effective_batch_size) // rows_per_epoch:
                self._note_cleanup(self.cleaner.before("epoch"))
            number = self.state.step + 1
            with self.monitor.phase("train"):
                stop = self._step(number)
            self.state.step = number
            self._care(number)
            is_last = number == max_steps
            is_best = (number % int(train.eval_steps) == 0 or is_last) and self._evaluate()
            if number % int(train.save_steps) == 0 or is_last or is_best or stop:
                self._save(is_best)
            if stop and not is_last:
                raise Interrupted(
                    f"stopped after step {number}, saved in {self.start.run_dir}; go on with --is_keep_training=True"
                )

    def _step(self, number: int) -> bool:
        """One optimizer step. Returns whether a stop was asked for on any process."""
        began = time.perf_counter()
        config, choice = self.config, self.plan.choice
        rate = learning_rate(
            number, schedule=config.train.lr_schedule, peak=float(config.train.learning_rate),
            warmup_steps=int(config.train.warmup_steps), max_steps=int(config.train.max_steps),
        )  # fmt: skip
        while True:
            try:
                batches = self._micro_batches(number, choice.batch_size_per_gpu)
                slices = [self._to_slice(batch) for batch in batches]
                labels, tokens, stop = sum_over(
                    self.accelerator,
                    sum(s.num_labels for s in slices),
                    sum(b.num_tokens for b in batches),
                    int(self.interrupts.stop_requested),
                )
                self.update.begin(Step(number, rate, config.train.weight_decay, config.run.seed))
                loss = self._walk(slices, labels)
                break
            except Exception as error:
                choice = self._shrink(error, number)
        mean = sum_over(self.accelerator, float(loss))[0] / max(labels, 1)
        seconds = time.perf_counter() - began
        self._record_step(number, mean, rate, int(tokens), seconds)
        return bool(stop)

    def _walk(self, slices: list[Slice], labels: float) -> torch.Tensor:
        """Gradients and update: one walk with all slices, or several that add up before the last one updates."""
        group = max(1, -(-len(slices) // self.plan.choice.num_walks))
        groups = [slices[at : at + group] for at in range(0, len(slices), group)]
        total = torch.zeros((), device=self.device.torch_device)
        for index, members in enumerate(groups):
            is_last = index == len(groups) - 1
            total += self.walk.gradients(members, int(labels), self.reducer.ready if is_last else lambda weights: None)
        self.reducer.finish()
        self.update.finish()
        return total

    def _shrink(self, error: Exception, number: int) -> Choice:
        """After an out-of-memory error: free, halve the micro-batch, and let the step run again from its first row."""
        if not self.device.is_out_of_memory(error):
            raise error
        choice = self.plan.choice
        if self.update.has_begun or self.accelerator.num_processes > 1:
            raise DoesNotFit(
                f"out of memory in step {number}, in the middle of its updates: {error}; go on from the last checkpoint with "
                f"--is_keep_training=True --batch_size_per_gpu={max(1, choice.batch_size_per_gpu // 2)}"
            ) from error
        for weight in self.model.parameters():
            weight.grad = None
        record = self.recovery.after_out_of_memory(
            error, phase="train", batch_size=choice.batch_size_per_gpu, rows_per_step=self.plan.effective_batch_size,
            shape="{} + {} tokens".format(*self.start.loader.longest),
        )  # fmt: skip
        self.metrics.write("recovery", step=number, **record.as_dict())
        self._tell(record.report)
        walks = choice.num_walks if choice.num_walks == 1 else record.gradient_accumulation_steps or 1
        slices = (record.gradient_accumulation_steps or 1) // walks
        choice = replace(choice, batch_size_per_gpu=record.batch_size, num_slices=slices, num_walks=walks)
        self.plan = replace(self.plan, choice=choice)
        self.state.choice = asdict(choice)
        return choice

    def _micro_batches(self, number: int, batch_size: int) -> list[Batch]:
        return self.start.loader.micro_batches(
            number - 1, effective_batch_size=self.plan.effective_batch_size, batch_size=batch_size,
            rank=self.accelerator.process_index, num_processes=self.accelerator.num_processes,
        )  # fmt: skip

    def _to_slice(self, batch: Batch) -> Slice:
        return to_slice(batch, self.model.config.pad_token_id, self.device.torch_device)

    def _record_step(self, number: int, loss: float, rate: float, tokens: int, seconds: float) -> None:
        choice = self.plan.choice
        self.state.tokens += tokens
        self._loop_seconds += seconds
        self._loop_tokens += tokens
        self.metrics.write(
            "step", step=number, loss=loss, learning_rate=rate, tokens=tokens, seconds=round(seconds, 4),
            tokens_per_second=round(tokens / seconds, 1), batch_size_per_gpu=choice.batch_size_per_gpu,
            gradient_accumulation_steps=choice.gradient_accumulation_steps,
        )  # fmt: skip
        logger.debug("step {} loss {:.4f} lr {:.2e} {:.0f} tokens/s", number, loss, rate, tokens / seconds)
        now = self.monitor.sample("train")
        used = now.device_bytes if self.device.is_separate_memory else now.anon_bytes
        self.progress.step(
            Reading(number, loss, rate, tokens / seconds, used, self.monitor.peak_bytes, self.plan.budget_bytes)
        )

    # --- around the step ---

    def _evaluate(self) -> bool:
        """Measure the loss on held-out rows; returns whether it is the best so far."""
        self._note_cleanup(self.cleaner.before("evaluation"))
        with self.monitor.phase("evaluation"):
            batches = self.start.validation.evaluation_batches(
                self.config.train.eval_rows, self.plan.choice.eval_batch_size_per_gpu,
                self.accelerator.process_index, self.accelerator.num_processes,
            )  # fmt: skip
            result = evaluate(self.walk, batches, self.accelerator, self.device.torch_device)
        if not result.tokens:
            return False
        is_best = self.state.best_eval_loss is None or result.loss < self.state.best_eval_loss
        if is_best:
            self.state.best_eval_loss = result.loss
        if self._first_eval_loss is None:
            self._first_eval_loss = result.loss
        self.metrics.write(
            "eval",
            step=self.state.step,
            loss=result.loss,
            perplexity=result.perplexity,
            rows=result.rows,
            tokens=result.tokens,
        )
        self._tell(
            f"step {self.state.step}: evaluation loss {result.loss:.4f}, perplexity {result.perplexity:,.1f} ({result.rows} rows)"
        )
        self._record_memory("evaluation")
        return is_best

    def _care(self, number: int) -> None:
        """Clean by schedule and under pressure; a full cleaning leaves a memory record."""
        record = self.cleaner.after_step(number)
        if record is None and self.monitor.pressure() > PRESSURE:
            record = self.cleaner.under_pressure()
        if record is not None:
            self._note_cleanup(record)

    def _note_cleanup(self, record: CleanupRecord) -> None:
        self.metrics.write(
            "cleanup", step=self.state.step, kind=record.kind, freed_bytes=record.freed_bytes, reason=record.reason
        )
        if record.kind == "full" and record.reason in ("schedule", "pressure"):
            self._record_memory("train")

    def _record_memory(self, phase: str) -> None:
        self.monitor.record(self.state.step, phase)
        logger.info(self.monitor.line(self.state.step))

    def _save(self, is_best: bool) -> None:
        """Write a checkpoint: the whole model folder, and what resuming needs."""
        with self.monitor.phase("save"):
            path = self.checkpoints.save(
                self.state.step,
                lambda folder: write_checkpoint(folder, self.model, self.start.tokenizer, self.optimizer, self.state),
                is_best,
            )
        self.metrics.write("checkpoint", step=self.state.step, path=str(path), best=is_best)
        logger.info("step {} saved to {}", self.state.step, path)

    def _finish(self) -> Summary:
        """Publish the best model, show samples and the summary."""
        run_dir = self.start.run_dir
        best = self.checkpoints.best() or self.checkpoints.latest()
        if self.is_main and best is not None:
            publish(best, run_dir)
        prompt = "..."
        if self.is_main:
            with self.monitor.phase("samples"):
                prompt = (
                    show_samples(
                        self.walk,
                        self.start.validation,
                        self.start.tokenizer,
                        self.config.train.sample_rows,
                        self.progress,
                        self.metrics,
                    )
                    or prompt
                )
        self._record_memory("end")
        self.monitor.stop()
        summary = Summary(
            steps=self.state.step, seconds=self._loop_seconds, tokens_per_second=self._loop_tokens / max(self._loop_seconds, 1e-9),
            first_eval_loss=self._first_eval_loss, best_eval_loss=self.state.best_eval_loss,
            planned_peak_bytes=self.plan.peak_bytes, measured_peak_bytes=self._measured_peak(), budget_bytes=self.plan.budget_bytes,
            phase_peaks=dict(self.monitor.phase_peaks), care_seconds=self.monitor.cost_seconds + self.cleaner.total_seconds,
            model_dir=str(run_dir),
        )  # fmt: skip
        self.metrics.write("end", step=self.state.step, **{k: v for k, v in asdict(summary).items() if k != "steps"})
        self.metrics.close()
        self.progress.table("done", summary_rows(summary))
        self.progress.note(
            "next\n"
            + "\n".join(f"  {line}" for line in next_commands(str(run_dir), self.config.train.is_finetune, prompt))
        )
        self.accelerator.wait_for_everyone()
        self.accelerator.end_training()
        return summary

    def _measured_peak(self) -> int:
        return self.device.memory_peak_bytes() if self.device.is_separate_memory else self.monitor.peak_bytes

    def _tell(self, text: str) -> None:
        """Say something on the screen and in the log."""
        self.progress.note(text)
        logger.info(text)


def _kind(config: Config) -> str:
    return "finetune" if config.train.is_finetune else "pretrain"


def _refuse(problems: list[str]) -> None:
    if problems:
        raise UserError(*problems)


def _local_processes() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))
