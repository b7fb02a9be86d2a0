"""What is shown of a run: the plan before it, its result and the details after it."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.language import say
from common.units import MIB, format_size
from memory.plan import Plan
from settings.declared import Config, places
from settings.fields import counted
from settings.program import program
from settings.tasks import command_of
from training.report.history import history
from training.report.wording import about, duration

Rows = list[tuple[str, str]]
PHASES = ("prepare", "probe", "reference", "load", "evaluation", "train", "save")  # shown at the end
WHOLE_LETTERS = 200  # of a prompt that is shown whole
PROMPT_LETTERS = 60  # of the example prompt in the next command


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
    skipped_batches: int = 0  # whose loss or gradient was not finite
    rate_factor: float = 1.0  # what is left of the learning rate
    metrics_file: str = ""
    best_evaluation: dict[str, Any] | None = None  # step and numbers of that of the published model
    first_over: str | None = None  # when the budget was first exceeded; None: it was kept
    counted_peak_bytes: int | None = None  # since the budget is what it is; None: of a device's own
    # where the plan is about a device's own memory: the host's, of which phase_peaks are
    host_peak_bytes: int | None = None
    host_budget_bytes: int | None = None

    @property
    def run_peak_bytes(self) -> int:
        """The peak that the plan speaks of: a probe, a second process beside this one, is over before its first
        step.
        """
        rest = [size for phase, size in self.phase_peaks.items() if phase not in ("start", "prepare", "probe")]
        is_of_phases = self.host_peak_bytes is None
        return max(rest) if is_of_phases and self.is_probe_highest and rest else self.measured_peak_bytes

    @property
    def over_peak_bytes(self) -> int:
        """The peak that exceeded the budget: not one from before it was lowered, which was within it."""
        is_counted = self.counted_peak_bytes is not None and self.counted_peak_bytes > self.budget_bytes
        return int(self.counted_peak_bytes or 0) if is_counted else self.measured_peak_bytes

    @property
    def is_probe_highest(self) -> bool:
        """Whether no phase has taken more of the host than the probe."""
        highest = self.measured_peak_bytes if self.host_peak_bytes is None else self.host_peak_bytes
        return self.phase_peaks.get("probe", 0) >= highest

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
        peak, budget = self.over_peak_bytes, self.budget_bytes
        message = (
            "--memory_budget = {budget}, was exceeded, first {when}: the peak was {peak}; everything is saved in "
            "{folder}. Use --memory_budget={enough}M, or settings that take less: see `plan`"
        )
        if not self.is_plan_over:
            peak, budget = self.host_peak_bytes or 0, self.host_budget_bytes or 0
            message = (
                "--memory_budget = {budget}, was exceeded in RAM, first {when}: the peak was {peak}, with the "
                "libraries of the device; everything is saved in {folder}. Use --memory_budget={enough}M"
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
    batch = counted(plan.effective_batch_size, "row")
    if choice.accumulation_passes * choice.micro_batches_per_pass > 1:
        batch = say(
            "{rows} = micro-batch {micro} x accumulation {times}",
            rows=batch,
            micro=choice.batch_size_per_gpu,
            times=choice.gradient_accumulation_steps,
        )
    peak = say(
        "{peak} of {budget} ({share})",
        peak=format_size(plan.peak_bytes),
        budget=format_size(plan.budget_bytes),
        share=f"{plan.peak_bytes / plan.budget_bytes:.0%}",
    )
    rows: Rows = [(say("predicted peak"), peak)]
    if promise := promised_time(plan):
        rows.append((say("time"), promise))
    return [
        *rows,
        (
            say("parameters"),
            say(
                "{count}, stored in {storage}, computed in {compute}",
                count=f"{weights:,}",
                storage=choice.storage,
                compute=choice.compute,
            ),
        ),
        (say("effective batch"), batch),
        (say("activation checkpointing"), plan.recomputed()),
        (
            say("data files"),
            say("reopened for every read (ultra_low_mem)") if reopens else say("kept open (ultra_low_mem is off)"),
        ),
        (say("disk"), disk),
        *((say("note"), reason) for reason in plan.reasons),
    ]


def parts_rows(plan: Plan) -> Rows:
    """What the predicted peak is made of; parts of less than a hundredth are one."""
    parts = {name: size for name, size in plan.components.items() if size > plan.peak_bytes / 100}
    other = plan.peak_bytes - sum(parts.values())
    return [
        (say(name), format_size(size)) for name, size in ({**parts, "other": other} if other > 0 else parts).items()
    ]


def result_rows(summary: Summary) -> Rows:
    """What a run has given: model, score, peak against budget."""
    s, rows = summary, Rows([(say("model"), summary.model_dir)])
    if s.first_eval_loss is not None and s.best_eval_loss is not None:
        first = f"{s.first_eval_loss:.3f}"
        loss: str = say("{loss} before training, never lower since", loss=first)
        if s.best_eval_loss < s.first_eval_loss:
            loss = f"{first} -> {s.best_eval_loss:.3f}"
        rows.append((say("evaluation loss"), loss))
    name = say("peak memory") if s.host_peak_bytes is None else say("peak memory of the device")
    told = _against(s.measured_peak_bytes, s.budget_bytes, None)
    if s.is_plan_over:
        told = _against(s.over_peak_bytes, s.budget_bytes, s.first_over)
    elif s.counted_peak_bytes is not None and s.measured_peak_bytes > s.budget_bytes:
        told = "{peak}, within the budget of {budget} since it was lowered; {highest} before"
        if s.counted_peak_bytes > s.budget_bytes:
            told = "{peak}, in the margin above the budget of {budget} since others have lowered it; {highest} before"
        told = say(
            told,
            peak=format_size(s.counted_peak_bytes),
            budget=format_size(s.budget_bytes),
            highest=format_size(s.measured_peak_bytes),
        )
    rows.append((name, told))
    if s.host_peak_bytes is not None and s.host_budget_bytes is not None:
        over = s.first_over if s.is_ram_over else None
        rows.append((say("peak RAM"), _against(s.host_peak_bytes, s.host_budget_bytes, over)))
    return rows


def _against(peak: int, budget: int, over: str | None) -> str:
    """A peak beside its budget; `over`: when that was first exceeded."""
    sizes = {"peak": format_size(peak), "budget": format_size(budget)}
    if over is None:
        return say("{peak}, within the budget of {budget}", **sizes)
    return say("{peak}, OVER the budget of {budget}, first {when}", when=over, **sizes)


def detail_rows(summary: Summary) -> Rows:
    """How a run went: steps, plan against measurement, peaks by phase."""
    s = summary
    took = {"time": duration(s.seconds), "speed": f"{s.tokens_per_second:,.0f}"}
    if not s.steps_here:
        steps = say("{steps}, all done before; --max_steps={more} trains further", steps=s.steps, more=2 * s.steps)
    elif s.steps_here < s.steps:
        steps = say("{steps}, the last {here} in {time}, {speed} tokens/s", steps=s.steps, here=s.steps_here, **took)
    else:
        steps = say("{steps} in {time}, {speed} tokens/s", steps=s.steps, **took)
    peak = say(
        "planned {planned}, measured {measured} ({deviation})",
        planned=format_size(s.planned_peak_bytes),
        measured=format_size(s.run_peak_bytes),
        deviation=f"{s.run_peak_bytes / s.planned_peak_bytes - 1:+.0%}",
    )
    rows: Rows = [(say("steps"), steps), (say("peak"), peak)]
    rows += [] if s.host_peak_bytes is None else [(say("peak RAM"), format_size(s.host_peak_bytes))]
    phases = set(PHASES) if s.is_probe_highest else set(PHASES) - {"probe"}
    shown = {phase: size for phase, size in s.phase_peaks.items() if phase in phases}
    names = {phase: f"in {phase}" for phase in shown}
    rows += [("  " + say(names[phase]), format_size(size)) for phase, size in shown.items()]
    if s.steps_here:
        cost = {"seconds": f"{s.care_seconds:.1f}", "share": f"{s.care_seconds / s.watched_seconds:.1%}"}
        rows.append((say("monitoring and cleanup"), say("{seconds} s, {share} of the run", **cost)))
    if s.skipped_batches or s.rate_factor < 1:
        batches = counted(s.skipped_batches, "batch")
        lost = say("{batches} skipped", batches=batches)
        if s.rate_factor < 1:
            lost = say("{batches}, learning rate x {factor}", batches=lost, factor=f"{s.rate_factor:g}")
        rows.append((say("inf or nan"), lost))
    return rows


def _example(prompt: str) -> str:
    """A short piece of a prompt that a shell takes between quotes; around the first gap where there is one to fill."""
    words = " ".join(prompt.replace("'", " ").split())
    middle = words.find("<extra_id_0>")
    start = words.rfind(" ", 0, max(0, middle - PROMPT_LETTERS // 2)) + 1 if middle > 0 else 0
    if middle < 0 and len(words) <= WHOLE_LETTERS:
        return words  # a question that breaks off asks another thing
    piece = words[start : start + PROMPT_LETTERS + 12]
    return piece if len(piece) < PROMPT_LETTERS else piece.rpartition(" ")[0] or piece


def next_commands(model_dir: str, leads_to_finetuning: bool, prompt: str) -> Sequence[str]:
    """What the user may type next: an answer to a prompt, an evaluation, and finetuning where the model is there for
    it.
    """
    typed, model_dir = program(), shlex.quote(model_dir)
    lines = [
        f"{typed} generate --model={model_dir} --input='{_example(prompt)}'",
        f"{typed} evaluate --model={model_dir}",
    ]
    if leads_to_finetuning:
        lines.append(f"{typed} train --is_finetune=True --finetune_from={model_dir}")
    return lines


def resume_command(values: Mapping[str, Any]) -> str:
    """The whole command that continues a run, with the folders, and the device, that have to be named again.

    Args:
        values: of all settings of the run, by flat name.
    """
    defaults = Config().as_dict()
    # several processes have their device before they have read what the run has saved
    asked = (*places(), "device", "log_with")
    named = [f"--{name}={shlex.quote(str(values[name]))}" for name in asked if values[name] != defaults[name]]
    name = shlex.quote(values["run_name"])
    words = [program(), command_of(values["objective"]), "--is_keep_training=True", f"--run_name={name}"]
    return " ".join([*words, *named])
