"""What do the steps of a model really take on this machine? Predicted beside measured, one child process for each trial.

Idea: a prediction is worth what a measurement of it is worth. Each trial changes one thing (sequence length, micro-batch,
LoRA rank), is planned like a run, and is then run by `memory.probe` in a process of its own: where it is killed, fails
or takes too long, that is a row of the table and not the end. What is predicted not to fit is not tried, because on a
machine with swap it would not fail but stall everything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from config import Config, DoesNotFit
from data.batches.objectives import lengths_of
from language import english, join, say
from memory.cost.prediction import Machine
from memory.cost.shapes import Shapes
from memory.plan import Plan, plan
from memory.probe import ProbeRequest, ProbeResult, probe
from settings.fields import AUTO
from training.report.wording import about

TRIAL_SECONDS = 120.0  # longest trial
STEPS_OF_A_TRIAL = 6  # what a probe does takes about as long as this many steps
RANKS = (4, 16, 64)
SHARES = (0.25, 0.5, 1.0, 2.0)  # of max_seq_len
SHORTEST, LONGEST = 16, 65536  # tokens


@dataclass(frozen=True)
class Trial:
    """One thing to try.

    Args:
        kind: "step", "sequence length", "micro-batch" or "LoRA rank". label: which one of its kind.
        config: as a run would have it.
    """

    kind: str
    label: str
    config: Config


def trial_name(kind: str, label: str) -> str:
    """What is tried, in words."""
    return join(" ", [say(kind), say(label)])


@dataclass(frozen=True)
class Result:
    """What became of a trial. Bytes are the peak of the process, or of the device with memory of its own.

    Args:
        predicted_bytes, predicted_seconds: of the plan; None where it found no way.
        measured_bytes, seconds: of the probe, a step; None where it did not end.
        tokens: of a step, both sides. outcome: "" where it went well, else what happened.
    """

    kind: str
    label: str
    predicted_bytes: int | None = None
    measured_bytes: int | None = None
    predicted_seconds: float | None = None
    seconds: float | None = None
    tokens: int = 0
    outcome: str = ""

    @property
    def deviation(self) -> float | None:
        """Share by which the measurement is above the prediction."""
        if self.predicted_bytes is None or self.measured_bytes is None:
            return None
        return self.measured_bytes / self.predicted_bytes - 1

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self)


def trials_of(config: Config, machine: Machine) -> list[Trial]:
    """What is worth trying for these settings: a run's own step, and what is around it.

    Args:
        config: of the command; lengths and batch as the user has them.
    """
    base = config.changed(sample_rows=0)  # a run's last lines; they cost time here and no memory
    try:
        planned = planned_for(base, machine)[0].choice.batch_size_per_gpu
    except DoesNotFit:
        planned = 1
    lengths = sorted({min(LONGEST, max(SHORTEST, int(base.data.max_seq_len * share))) for share in SHARES})
    batch_sizes = sorted({1, max(1, planned // 2), planned, 2 * planned})
    trials = [Trial("step", "as planned", base)]
    trials += [Trial("sequence length", str(n), _changed(base, 1, max_seq_len=n)) for n in lengths]
    trials += [Trial("micro-batch", str(n), _changed(base, n)) for n in batch_sizes]
    return trials + [Trial("LoRA rank", str(n), _with_adapters(base, n)) for n in RANKS]


def _with_adapters(base: Config, rank: int) -> Config:
    config = _changed(base, 1, lora_rank=rank)
    return config if config.given("optimizer") else config.changed(optimizer="adamw")  # as a run takes for adapters


def _changed(base: Config, rows: int, **values: Any) -> Config:
    """The settings with some changed, and a step of exactly one micro-batch."""
    batch = {"effective_batch_size": rows, "batch_size_per_gpu": rows, "gradient_accumulation_steps": AUTO}
    return base.changed(**batch, **values)


def run_trials(trials: list[Trial], machine: Machine, tell: Callable[[str], object]) -> Iterator[Result]:
    """Run one after the other; the first that runs also tells what the model takes once it is loaded.

    Args:
        tell: called with a line before each that runs.
    """
    has_loaded = False
    for number, trial in enumerate(trials, 1):
        try:
            planned, shapes = planned_for(trial.config, machine)
        except DoesNotFit as error:
            yield Result(trial.kind, trial.label, outcome=say("does not fit: {need}", need=_need_of(error)))
            continue
        expected = planned.seconds * STEPS_OF_A_TRIAL
        if expected > TRIAL_SECONDS:
            outcome = say("not tried: a step would take about {seconds} s", seconds=f"{planned.seconds:.0f}")
            yield Result(trial.kind, trial.label, planned.peak_bytes, None, planned.seconds, outcome=outcome)
            continue
        told = "  {number} of {count}: {trial}, {time} and the start of its process"
        name, time = trial_name(trial.kind, trial.label), about(expected, expected, expected)
        tell(say(told, number=number, count=len(trials), trial=name, time=time))
        choice = planned.choice
        worst = shapes.worst_steps(choice.batch_size_per_gpu, choice.micro_batches_per_pass)
        steps, evaluation = tuple(map(tuple, worst)), shapes.worst_steps(choice.eval_batch_size_per_gpu)[0][0]
        measured = probe(ProbeRequest(trial.config, choice, steps, evaluation), None, TRIAL_SECONDS)
        if not has_loaded:
            has_loaded = True
            yield _loaded(planned, measured)
        yield _compared(trial, planned, measured, sum(sum(row) for micro_batch in steps[0] for row in micro_batch))


def _need_of(refusal: DoesNotFit) -> str:
    """What the refusal says is needed, without its parts."""
    return str(english(refusal.problems[0])).rpartition(": ")[2].partition(" (")[0]


def planned_for(config: Config, machine: Machine) -> tuple[Plan, Shapes]:
    """The plan of these settings with rows of full length, and those rows.

    Raises:
        DoesNotFit: no way fits.
    """
    objective = config.data.objective if config.data.objective != AUTO else "span"
    lengths = lengths_of(config.data, objective)
    planned = plan(config, machine, source_tokens=lengths.input_tokens, target_tokens=lengths.target_tokens)
    rows = planned.choice.batch_size_per_gpu * planned.choice.gradient_accumulation_steps
    return planned, Shapes.longest(rows, lengths.input_tokens, lengths.target_tokens)


def _loaded(planned: Plan, measured: ProbeResult) -> Result:
    parts = sum(size for name, size in planned.components.items() if name in ("base", "weights"))
    return Result(
        "model load", "weights", planned.phases.get("load", parts), (measured.phases or {}).get("load"),
        outcome=measured.failed,
    )  # fmt: skip


def _compared(trial: Trial, planned: Plan, measured: ProbeResult, tokens: int) -> Result:
    peak = max(measured.phases.values()) if measured.phases else None
    return Result(
        trial.kind, trial.label, planned.peak_bytes, peak, planned.seconds, measured.step_seconds or None, tokens,
        measured.failed,
    )  # fmt: skip
