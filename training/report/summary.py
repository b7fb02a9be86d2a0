"""What is shown to the user before and after a run: the plan before, the summary after."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from config import PREFERENCES, Config
from memory.plan import Plan
from settings.fields import counted
from training.report.progress import about, duration
from units import MIB, format_size

Rows = list[tuple[str, str]]
PHASES = ("prepare", "reference", "load", "evaluation", "train", "save")  # shown at the end
PROMPT_LETTERS = 60  # of the example prompt in the next command


@dataclass
class Summary:
    """The end of a run: what was planned, what was measured, what came out. Sizes in bytes, times in seconds."""

    steps: int
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
    first_over: str | None = None  # when the budget was first exceeded; None: it was kept

    def over_budget(self) -> str:
        """What is said last of a run that exceeded its budget; empty where it did not."""
        if self.first_over is None:
            return ""
        return (
            f"--memory_budget = {format_size(self.budget_bytes)}, was exceeded, first {self.first_over}: the peak was "
            f"{format_size(self.measured_peak_bytes)}; all is saved in {self.model_dir}. Name --memory_budget="
            f"{-(-self.measured_peak_bytes // MIB)}M, or what takes less: `plan` shows it"
        )


def plan_rows(plan: Plan, weights: int) -> Rows:
    """The plan as two columns."""
    choice = plan.choice
    batch = f"micro-batch {choice.batch_size_per_gpu} x accumulation {choice.gradient_accumulation_steps}"
    total = choice.accumulation_passes * choice.micro_batches_per_pass
    rows = [
        ("weights", f"{weights:,}, stored in {choice.storage}, computed in {choice.compute}"),
        (
            "effective batch",
            counted(plan.effective_batch_size, "row") + (f" = {batch}" if total > 1 else ""),
        ),
        ("activation checkpointing", recomputed(choice.saved_blocks, plan.num_blocks)),
        ("predicted peak", f"{format_size(plan.peak_bytes)} of {format_size(plan.budget_bytes)}"),
    ]
    rows += [(f"  {name}", format_size(size)) for name, size in plan.components.items() if size > plan.peak_bytes / 100]
    if plan.seconds_total is not None and plan.seconds_low is not None and plan.seconds_high is not None:
        rows.append(("time", about(plan.seconds_total, plan.seconds_low, plan.seconds_high)))
    return rows + [("why", reason) for reason in plan.reasons]


def recomputed(saved: int, total: int) -> str:
    """How many blocks backward recomputes: of `total`, all but those that are saved."""
    return f"{total - saved} of {total} blocks recomputed"


def summary_rows(summary: Summary) -> Rows:
    """The summary as two columns."""
    s = summary
    deviation = s.measured_peak_bytes / s.planned_peak_bytes - 1
    verdict = "inside" if s.first_over is None else f"OVER, first {s.first_over}"
    rows = [
        ("steps", _steps(s)),
        (
            "peak memory",
            f"planned {format_size(s.planned_peak_bytes)}, measured {format_size(s.measured_peak_bytes)} ({deviation:+.0%})",
        ),
        ("budget", f"{format_size(s.budget_bytes)}: {verdict}"),
        *((f"  in {phase}", format_size(size)) for phase, size in s.phase_peaks.items() if phase in PHASES),
    ]
    if s.seconds:
        rows.append(
            ("watching and cleaning", f"{s.care_seconds:.1f} s, {s.care_seconds / s.watched_seconds:.1%} of the run")
        )
    if s.first_eval_loss is not None and s.best_eval_loss is not None:
        rows.insert(1, ("evaluation loss", f"{s.first_eval_loss:.3f} -> {s.best_eval_loss:.3f}"))
    if s.skipped_batches or s.rate_factor < 1:
        slower = f", learning rate x {s.rate_factor:g}" if s.rate_factor < 1 else ""
        batches = f"{s.skipped_batches:,} batch{'es' * (s.skipped_batches != 1)}"
        rows.append(("inf or nan", f"{batches} left out{slower}"))
    return [*rows, ("model", s.model_dir)]


def _steps(summary: Summary) -> str:
    if not summary.seconds:
        return f"{summary.steps}, all done before; --max_steps={2 * summary.steps} would train on"
    return f"{summary.steps} in {duration(summary.seconds)}, {summary.tokens_per_second:,.0f} tokens/s"


def _example(prompt: str) -> str:
    """A short piece of a prompt that a shell takes between quotes; around the first gap where there is one to fill."""
    words = " ".join(prompt.replace("'", " ").split())
    middle = words.find("<extra_id_0>")
    start = words.rfind(" ", 0, max(0, middle - PROMPT_LETTERS // 2)) + 1 if middle > 0 else 0
    piece = words[start : start + PROMPT_LETTERS + 12]
    return piece if len(piece) < PROMPT_LETTERS else piece.rpartition(" ")[0] or piece


def next_commands(model_dir: str, is_finetune: bool, prompt: str) -> Sequence[str]:
    """What the user may type next."""
    program = "python train_low_mem.py"
    lines = [
        f"{program} generate --model={model_dir} --input='{_example(prompt)}'",
        f"{program} evaluate --model={model_dir}",
    ]
    return lines if is_finetune else [*lines, f"{program} train --is_finetune=True --finetune_from={model_dir}"]


def resume_command(config: Config) -> str:
    """The whole command that continues a run, with the folders that have to be named again."""
    command = "dpo" if config.data.objective == PREFERENCES else "train"
    places = ("output_dir", "log_dir", "cache_dir", "checkpoint_mirror")
    values, defaults = config.as_dict(), Config().as_dict()
    named = [f"--{name}={shlex.quote(str(values[name]))}" for name in places if values[name] != defaults[name]]
    words = [
        "python train_low_mem.py",
        command,
        "--is_keep_training=True",
        f"--run_name={shlex.quote(config.run.run_name)}",
    ]
    return " ".join([*words, *named])
