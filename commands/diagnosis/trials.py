"""What steps of a model really take on this machine: predicted beside measured.

Each trial changes one thing (sequence length, micro-batch, LoRA rank), is resolved like a run, and is run by `memory.probe` in a
process of its own: where it is killed, fails or takes too long, that is a row of the table and not the end. What is predicted not to
fit is not tried, because on a machine with swap it would not fail but stall everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from config import Config, DoesNotFit
from language import english, join, say
from memory.estimate.shapes import Shapes
from memory.estimate.workload import Machine
from memory.plan import Plan
from memory.probe import ProbeRequest, ProbeResult, probe
from settings.fields import AUTO
from training.report.wording import about
from training.start.resolving import Rows, resolve

TRIAL_SECONDS = 120.0  # longest trial
STEPS_OF_A_TRIAL = 6  # what a probe does takes about as long as this many steps
RANKS = (4, 16, 64)
SHARES = (0.25, 0.5, 1.0, 2.0)  # of max_seq_len
SHORTEST, LONGEST = 16, 65536  # tokens


class Trial(NamedTuple):
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


def trials_of(config: Config, machine: Machine) -> list[Trial]:
    """What is worth trying for these settings: a run's own step, and what is around it.

    Args:
        config: of the command; lengths and batch as the user has them.
    """
    base = config.changed(sample_rows=0)  # a run's last lines; they cost time here and no memory

    def one(rows: int, **values: Any) -> Config:  # a step of exactly one micro-batch
        batch = {"effective_batch_size": rows, "batch_size_per_gpu": rows, "gradient_accumulation_steps": AUTO}
        return base.changed(**batch, **values)

    try:
        planned = resolve(base, machine, Rows.as_set(base)).plan.choice.batch_size_per_gpu
    except DoesNotFit:
        planned = 1
    lengths = sorted({min(LONGEST, max(SHORTEST, int(base.data.max_seq_len * share))) for share in SHARES})
    batch_sizes = sorted({1, max(1, planned // 2), planned, 2 * planned})
    for_adapters = {} if base.given("optimizer") else {"optimizer": "adamw"}  # as a run takes for adapters
    return [
        Trial("step", "as planned", base),
        *(Trial("sequence length", str(n), one(1, max_seq_len=n)) for n in lengths),
        *(Trial("micro-batch", str(n), one(n)) for n in batch_sizes),
        *(Trial("LoRA rank", str(n), one(1, lora_rank=n, **for_adapters)) for n in RANKS),
    ]


def run_trials(trials: list[Trial], machine: Machine, tell: Callable[[str], object]) -> Iterator[dict[str, Any]]:
    """Run one after the other; the first that runs also tells what the model takes once it is loaded.

    Args:
        tell: called with a line before each that runs.
    Returns:
        for each a row of plain values: kind, label, predicted and measured bytes (of the process, or of the device with memory of its
        own), predicted and measured seconds of a step, its tokens (both sides), outcome ("" where it went well). None: not known.
    """
    has_loaded = False
    for number, trial in enumerate(trials, 1):
        try:
            spec = resolve(trial.config, machine, Rows.as_set(trial.config))
        except DoesNotFit as error:
            need = str(english(error.problems[0])).rpartition(": ")[2].partition(" (")[0]  # without its parts
            yield _row(trial.kind, trial.label, outcome=say("does not fit: {need}", need=need))
            continue
        plan, choice = spec.plan, spec.plan.choice
        predicted = {"predicted_bytes": plan.peak_bytes, "predicted_seconds": plan.seconds}
        expected = plan.seconds * STEPS_OF_A_TRIAL
        if expected > TRIAL_SECONDS:
            outcome = say("not tried: a step would take about {seconds} s", seconds=f"{plan.seconds:.0f}")
            yield _row(trial.kind, trial.label, **predicted, outcome=outcome)
            continue
        told = "  {number} of {count}: {trial}, {time} and the start of its process"
        name, time = trial_name(trial.kind, trial.label), about(expected, expected, expected)
        tell(say(told, number=number, count=len(trials), trial=name, time=time))
        count = choice.batch_size_per_gpu * choice.gradient_accumulation_steps
        shapes = Shapes.longest(count, spec.rows.source_tokens, spec.rows.target_tokens)
        steps = tuple(map(tuple, shapes.worst_steps(choice.batch_size_per_gpu, choice.micro_batches_per_pass)))
        evaluation = shapes.worst_steps(choice.eval_batch_size_per_gpu)[0][0]
        measured = probe(ProbeRequest(trial.config, choice, steps, evaluation), None, TRIAL_SECONDS)
        if not has_loaded:
            has_loaded = True
            yield _loaded(plan, measured)
        peak = max(measured.phases.values()) if measured.phases else None
        tokens = sum(sum(row) for micro_batch in steps[0] for row in micro_batch)
        yield _row(
            trial.kind, trial.label, **predicted, measured_bytes=peak, seconds=measured.step_seconds or None, tokens=tokens,
            outcome=measured.failed,
        )  # fmt: skip


def _loaded(plan: Plan, measured: ProbeResult) -> dict[str, Any]:
    parts = sum(size for name, size in plan.components.items() if name in ("base", "weights"))
    predicted, found = plan.phases.get("load", parts), (measured.phases or {}).get("load")
    return _row("model load", "weights", predicted_bytes=predicted, measured_bytes=found, outcome=measured.failed)


def _row(kind: str, label: str, **found: Any) -> dict[str, Any]:
    unknown = dict.fromkeys(("predicted_bytes", "measured_bytes", "predicted_seconds", "seconds"))
    return {"kind": kind, "label": label, **unknown, "tokens": 0, "outcome": "", **found}
