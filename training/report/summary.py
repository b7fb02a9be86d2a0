"""What is shown of a run: the plan before it, its result and the details after it."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memory.plan import Plan
from settings.declared import Config, places
from settings.fields import counted
from settings.program import program
from settings.tasks import MODEL_HEADS, command_of
from support.language import join, say
from support.units import MIB, format_size
from training.report.history import history
from training.report.run_files import EVAL_COUNTS
from training.report.wording import about, duration

Rows = list[tuple[str, str]]
PHASES = ("prepare", "probe", "reference", "load", "evaluation", "train", "save")  # shown at the end
WHOLE_PROMPT = 200  # The letters of a prompt that is shown whole; a question that breaks off asks another thing.
CUT_PROMPT = 72


@dataclass
class Summary:
    """The end of a run: what was planned, what was measured, what came out. Sizes in bytes, times in seconds."""

    steps: int
    steps_here: int  # done since this start; seconds and tokens_per_second are of them
    seconds: float
    tokens_per_second: float
    first_eval_loss: float | None
    best_eval_loss: float | None
    planned_peak_bytes: int
    measured_peak_bytes: int
    budget_bytes: int
    phase_peaks: dict[str, int]
    care_seconds: float  # watching and cleaning
    watched_seconds: float  # the whole run
    model_dir: str
    skipped_batches: int = 0  # The loss or gradient of each was not finite.
    rate_factor: float = 1.0  # The share of the learning rate that is used after such batches.
    metrics_file: str = ""
    best_evaluation: dict[str, Any] | None = None  # step and numbers of that of the published model
    first_over: str | None = None  # when the budget was first exceeded; None: it was kept
    counted_peak_bytes: int | None = None  # since the budget is what it is; None: of a device's own
    # These two are of the RAM beside a device with its own memory, of which the plan speaks; phase_peaks are of RAM.
    host_peak_bytes: int | None = None
    host_budget_bytes: int | None = None

    @property
    def run_peak_bytes(self) -> int:
        """The peak that the plan speaks of, without a probe, which is a second process and over before the first
        step.
        """
        phases = {phase: size for phase, size in self.phase_peaks.items() if phase not in ("start", "prepare", "probe")}
        is_of_probe = self.host_peak_bytes is None and self.phase_peaks.get("probe", 0) >= self.measured_peak_bytes
        return max(phases.values(), default=self.measured_peak_bytes) if is_of_probe else self.measured_peak_bytes

    @property
    def over_peak_bytes(self) -> int:
        """The peak that exceeded the budget: not one from before it was lowered, which was within it."""
        peak = self.counted_peak_bytes or 0
        return peak if peak > self.budget_bytes else self.measured_peak_bytes

    @property
    def is_ram_over(self) -> bool:
        """Whether the RAM beside a device with memory of its own has exceeded the budget."""
        return (self.host_peak_bytes or 0) > (self.host_budget_bytes or math.inf)

    @property
    def is_plan_over(self) -> bool:
        """Whether the memory that the plan is about has exceeded the budget, now or when it was another one."""
        return self.first_over is not None and (self.measured_peak_bytes > self.budget_bytes or not self.is_ram_over)

    def over_budget(self) -> str:
        """What is said last of a run that exceeded its budget; empty where it did not."""
        if self.first_over is None:
            return ""
        if self.is_plan_over:
            peak = self.over_peak_bytes
            budget = self.budget_bytes
            message = (
                "--memory_budget = {budget}, was exceeded, first {when}: the peak was {peak}; everything is "
                "saved in {folder}. Use --memory_budget={enough}M, or settings that need less memory (see "
                "`plan`)"
            )
        else:
            peak = self.host_peak_bytes or 0
            budget = self.host_budget_bytes or 0
            message = (
                "--memory_budget = {budget}, was exceeded in RAM, first {when}: the peak was {peak}, "
                "including the device's libraries; everything is saved in {folder}. Use "
                "--memory_budget={enough}M"
            )
        return say(
            message,
            budget=format_size(budget),
            when=self.first_over,
            peak=format_size(peak),
            folder=self.model_dir,
            enough=-(-max(peak, self.measured_peak_bytes) // MIB),
        )

    def history(self, event: str = "step") -> dict[str, list[Any]]:
        """The run's events of one kind as columns, which `pandas.DataFrame` takes; see `training.report.history`."""
        return history(self, event)


def promised_time(plan: Plan) -> str:
    """How long the run will take, in words; empty where nothing is known of this machine's speed."""
    if plan.seconds_total is None or plan.seconds_low is None or plan.seconds_high is None:
        return ""
    return about(plan.seconds_total, plan.seconds_low, plan.seconds_high)


def plan_rows(plan: Plan, weights: int, reopens: bool, disk: str) -> Rows:
    """The plan as two columns, what decides first.

    Args:
        weights: how many the model has. reopens: whether data files are opened anew for every read.
    """
    choice = plan.choice
    peak = say(
        "{peak} of {budget} ({share})",
        peak=format_size(plan.peak_bytes),
        budget=format_size(plan.budget_bytes),
        share=f"{plan.peak_bytes / plan.budget_bytes:.0%}",
    )
    rows: Rows = [(say("predicted peak"), peak)]
    if promise := promised_time(plan):
        rows.append((say("time"), promise))
    dtypes = say(
        "{count}, stored in {storage}, computed in {compute}",
        count=f"{weights:,}",
        storage=choice.storage,
        compute=choice.compute,
    )
    rows.append((say("parameters"), dtypes))
    batch = counted(plan.effective_batch_size, "row")
    if choice.accumulation_passes * choice.micro_batches_per_pass > 1:
        batch = say(
            "{rows} = micro-batch {micro} x accumulation {times}",
            rows=batch,
            micro=choice.batch_size_per_gpu,
            times=choice.gradient_accumulation_steps,
        )
    rows.append((say("effective batch"), batch))
    rows.append((say("activation checkpointing"), plan.recomputed()))
    files = say("reopened for every read (ultra_low_mem)") if reopens else say("kept open (ultra_low_mem is off)")
    rows.append((say("data files"), files))
    rows.append((say("disk"), disk))
    return [*rows, *((say("note"), reason) for reason in plan.reasons)]


def parts_rows(plan: Plan) -> Rows:
    """What the predicted peak is made of; parts of less than a hundredth are one."""
    parts = {name: size for name, size in plan.components.items() if size > plan.peak_bytes / 100}
    other = plan.peak_bytes - sum(parts.values())
    if other > 0:
        parts["other"] = other
    return [(say(name), format_size(size)) for name, size in parts.items()]


def result_rows(summary: Summary) -> Rows:
    """What a run has given: model, score, peak against budget."""
    rows: Rows = [(say("model"), summary.model_dir)]
    before = summary.first_eval_loss
    best = summary.best_eval_loss
    if before is not None and best is not None:
        loss: str = f"{before:.3f} -> {best:.3f}"
        if best >= before:
            loss = say("{loss} before training, never lower since", loss=f"{before:.3f}")
        rows.append((say("evaluation loss"), loss))
    if scores := _scores(summary.best_evaluation or {}):
        rows.append((say("scores"), scores))
    if summary.is_plan_over:
        peak = _against(summary.over_peak_bytes, summary.budget_bytes, summary.first_over)
    elif summary.counted_peak_bytes is not None and summary.measured_peak_bytes > summary.budget_bytes:
        peak = say(
            "{peak} since the budget was lowered to {budget}, {highest} before",
            peak=format_size(summary.counted_peak_bytes),
            budget=format_size(summary.budget_bytes),
            highest=format_size(summary.measured_peak_bytes),
        )
    else:
        peak = _against(summary.measured_peak_bytes, summary.budget_bytes, None)
    if summary.host_peak_bytes is None or summary.host_budget_bytes is None:
        return [*rows, (say("peak memory"), peak)]
    first_over = summary.first_over if summary.is_ram_over else None
    ram = _against(summary.host_peak_bytes, summary.host_budget_bytes, first_over)
    return [*rows, (say("peak memory of the device"), peak), (say("peak RAM"), ram)]


def _scores(evaluation: Mapping[str, Any]) -> str:
    """The scores of an evaluation, over all validation sets; empty where there is nothing but its loss."""
    figures = {name: value for name, value in evaluation.items() if name not in (*EVAL_COUNTS, "loss", "perplexity")}
    return join(", ", [f"{name} {value:.3f}" for name, value in figures.items() if "/" not in name])


def _against(peak: int, budget: int, first_over: str | None) -> str:
    """A peak beside its budget, and when that was first exceeded."""
    sizes = {"peak": format_size(peak), "budget": format_size(budget)}
    if first_over is None:
        return say("{peak}, within the budget of {budget}", **sizes)
    return say("{peak}, OVER the budget of {budget}, first {when}", when=first_over, **sizes)


def detail_rows(summary: Summary) -> Rows:
    """How a run went: steps, plan against measurement, peaks by phase."""
    total = summary.steps
    figures = {"time": duration(summary.seconds), "speed": f"{summary.tokens_per_second:,.0f}"}
    if not summary.steps_here:
        steps = say("{steps}, all done earlier; --max_steps={more} continues training", steps=total, more=2 * total)
    elif summary.steps_here < total:
        steps = say(
            "{steps}, the last {here} in {time}, {speed} tokens/s", steps=total, here=summary.steps_here, **figures
        )
    else:
        steps = say("{steps} in {time}, {speed} tokens/s", steps=total, **figures)
    peak = say(
        "planned {planned}, measured {measured} ({deviation})",
        planned=format_size(summary.planned_peak_bytes),
        measured=format_size(summary.run_peak_bytes),
        deviation=f"{summary.run_peak_bytes / summary.planned_peak_bytes - 1:+.0%}",
    )
    rows: Rows = [(say("steps"), steps), (say("peak"), peak)]
    if summary.host_peak_bytes is not None:
        rows.append((say("peak RAM"), format_size(summary.host_peak_bytes)))
    for phase, size in summary.phase_peaks.items():
        if phase in PHASES:
            sentence = f"in {phase}"
            rows.append(("  " + say(sentence), format_size(size)))
    if summary.steps_here:
        share = f"{summary.care_seconds / summary.watched_seconds:.1%}"
        cost = say("{seconds} s, {share} of the run", seconds=f"{summary.care_seconds:.1f}", share=share)
        rows.append((say("monitoring and cleanup"), cost))
    if summary.skipped_batches or summary.rate_factor < 1:
        skipped = say(
            "{batches} skipped, learning rate x {factor}",
            batches=counted(summary.skipped_batches, "batch"),
            factor=f"{summary.rate_factor:g}",
        )
        rows.append((say("inf or nan"), skipped))
    return rows


def next_commands(model_dir: str, head: str, leads_to_finetuning: bool, prompt: str) -> list[str]:
    """What the user may type next: what the model gives for a text, an evaluation, and finetuning where the model is
    there for it.

    Args:
        head: of the model, a key of `MODEL_HEADS`.
    """
    folder = shlex.quote(model_dir)
    lines = [
        f"{program()} {MODEL_HEADS[head].commands[0]} --model={folder} --input='{_example(prompt)}'",
        f"{program()} evaluate --model={folder}",
    ]
    if leads_to_finetuning:
        lines.append(f"{program()} train --is_finetune=True --finetune_from={folder}")
    return lines


def _example(prompt: str) -> str:
    """A short prompt that a shell takes between quotes, cut between words, around the first gap where there is one."""
    words = " ".join(prompt.replace("'", " ").split())
    if len(words) <= WHOLE_PROMPT:
        return words
    gap = words.find("<extra_id_0>")
    start = words.rfind(" ", 0, max(0, gap - CUT_PROMPT // 2)) + 1
    piece = words[start : start + CUT_PROMPT]
    if words.endswith(piece):
        return piece
    return piece.rpartition(" ")[0] or piece


def resume_command(values: Mapping[str, Any]) -> str:
    """The whole command that continues a run, with the folders, and the device, that have to be named again.

    Args:
        values: of all settings of the run, by flat name.
    """
    defaults = Config().as_dict()
    # Several processes have their device before they have read what the run has saved.
    flags = [
        f"--{name}={shlex.quote(str(values[name]))}"
        for name in (*places(), "device", "log_with")
        if values[name] != defaults[name]
    ]
    name = shlex.quote(values["run_name"])
    command = command_of(values["objective"])
    return " ".join([program(), command, "--is_keep_training=True", f"--run_name={name}", *flags])
