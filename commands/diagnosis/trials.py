"""What steps of a model really take on this machine: predicted beside measured.

Each trial changes one thing (sequence length, LoRA rank), is planned like a run, and is run by `memory.probe` in a process of
its own: where it is killed, fails or takes too long, that is a row of the table and not the end. Which micro-batch is best,
`plan` says. What is predicted not to fit is not tried, because on a machine with swap it would not fail but stall everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from language import english, join, say
from memory.estimate.shapes import Shapes
from memory.estimate.workload import Machine
from memory.probe import ProbeRequest, probe
from settings.declared import Config
from settings.errors import DoesNotFit
from settings.fields import AUTO
from training.report.wording import about
from training.setup.resolving import Rows, RunSpec, resolve

TRIAL_SECONDS = 120.0  # longest trial
STEPS_OF_A_TRIAL = 6  # what a probe does takes about as long as this many steps
RANKS = (4, 16, 64)
SHARES = (0.25, 0.5, 1.0, 2.0)  # of max_seq_len
SHORTEST, LONGEST = 16, 65536  # tokens


# its kind ("step", "sequence length" or "LoRA rank"), which one of its kind, and how a run would have it
Trial = tuple[str, str, Config]


def trial_name(kind: str, label: str) -> str:
    """What is tried, in words."""
    return join(" ", [say(kind), say(label)])


def trials_of(config: Config) -> list[Trial]:
    """What is worth trying for these settings: a run's own step, other lengths, and adapters.

    Args:
        config: of the command; lengths and batch as the user has them.
    """
    base = config.changed(sample_rows=0)  # a run's last lines; they cost time here and no memory
    one = base.changed(effective_batch_size=1, batch_size_per_gpu=1, gradient_accumulation_steps=AUTO)
    lengths = sorted({min(LONGEST, max(SHORTEST, int(base.data.max_seq_len * share))) for share in SHARES})
    for_adapters = {} if base.given("optimizer") else {"optimizer": "adamw"}  # as a run takes for adapters
    return [
        ("step", "as planned", base),
        *(("sequence length", str(n), one.changed(max_seq_len=n)) for n in lengths),
        *(("LoRA rank", str(n), one.changed(lora_rank=n, **for_adapters)) for n in RANKS),
    ]


def run_trials(trials: list[Trial], machine: Machine, tell: Callable[[str], object]) -> Iterator[dict[str, Any]]:
    """Run one after the other; the first that runs also tells what the model takes once it is loaded.

    Args:
        tell: called with a line before each that runs.
    Returns:
        for each a row of plain values: kind, label, predicted and measured bytes (of the process, or of the device with memory of its
        own), predicted and measured seconds of a step, its tokens (both sides), outcome ("" where it went well). None: not known.
        Beside them, of a device with memory of its own, `tensor_bytes` and `used_bytes` of `memory.probe.ProbeResult`.
    """
    unknown = dict.fromkeys(("predicted_bytes", "measured_bytes", "predicted_seconds", "seconds"))
    has_loaded = False
    for number, (kind, label, config) in enumerate(trials, 1):
        row: dict[str, Any] = {
            "kind": kind, "label": label, **unknown, "tokens": 0, "outcome": "", "tensor_bytes": 0, "used_bytes": 0,
        }  # fmt: skip
        try:
            spec = resolve(config, machine, Rows.as_set(config))
        except DoesNotFit as error:
            need = str(english(error.problems[0])).rpartition(": ")[2].partition(" (")[0]  # without its parts
            yield {**row, "outcome": say("does not fit: {need}", need=need)}
            continue
        plan = spec.plan
        row |= {"predicted_bytes": plan.peak_bytes, "predicted_seconds": plan.seconds}
        expected = plan.seconds * STEPS_OF_A_TRIAL
        if expected > TRIAL_SECONDS:
            text = "not tried: one step would take about {seconds} s"
            yield {**row, "outcome": say(text, seconds=f"{plan.seconds:.0f}")}
            continue
        text = "  {number} of {count}: {trial}, {time} plus process start"
        name, time = trial_name(kind, label), about(expected, expected, expected)
        tell(say(text, number=number, count=len(trials), trial=name, time=time))
        request = request_of(config, spec)
        measured = probe(request, None, TRIAL_SECONDS)
        phases = measured.phases or {}
        if not has_loaded:
            has_loaded = True
            parts = sum(size for part, size in plan.components.items() if part in ("base", "weights"))
            yield {
                **row, "kind": "model load", "label": "weights", "predicted_bytes": plan.phases.get("load", parts),
                "predicted_seconds": None, "measured_bytes": phases.get("load"), "outcome": measured.failed,
            }  # fmt: skip
        tokens = sum(sum(lengths) for micro_batch in request.steps[0] for lengths in micro_batch)
        yield {
            **row, "measured_bytes": max(phases.values(), default=None), "seconds": measured.step_seconds or None,
            "tokens": tokens, "outcome": measured.failed, "tensor_bytes": measured.tensor_bytes, "used_bytes": measured.used_bytes,
        }  # fmt: skip


def request_of(config: Config, spec: RunSpec) -> ProbeRequest:
    """The steps of a plan, all rows being as long as they may be."""
    choice = spec.plan.choice
    count = choice.batch_size_per_gpu * choice.gradient_accumulation_steps
    shapes = Shapes.longest(count, spec.rows.source_tokens, spec.rows.target_tokens)
    steps = tuple(map(tuple, shapes.worst_steps(choice.batch_size_per_gpu, choice.micro_batches_per_pass)))
    return ProbeRequest(config, choice, steps, shapes.worst_steps(choice.eval_batch_size_per_gpu)[0][0])
