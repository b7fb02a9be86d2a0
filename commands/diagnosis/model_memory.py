"""What steps of a model take on this machine: loading, sequence lengths and LoRA ranks by the estimate, one of them measured.

Each case is planned as `train` would plan it, with rows as long as they may be. The measured step runs in a process of its
own (`memory.probe`), so that its end by the system is a result like any other. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from language import join, say
from memory.estimate.shapes import Shapes
from memory.estimate.workload import Machine
from memory.probe import ProbeRequest, probe
from settings.declared import Config
from settings.errors import DoesNotFit
from settings.fields import AUTO
from settings.tasks import default_objective
from training.setup.resolving import Rows, RunSpec, resolve

LORA_RANKS = (4, 16, 64)
LENGTH_FACTORS = (0.25, 0.5, 1.0, 2.0)
SHORTEST_LENGTH = 16
LONGEST_LENGTH = 65536
STEPS_OF_PROBE = 6  # A probe takes about as long as this many steps.
MOST_PROBE_SECONDS = 120.0


@dataclass(frozen=True)
class Case:
    """A variation of the run that the settings describe.

    Args:
        kind: "step", "sequence length" or "LoRA rank".
        label: what it is, or its number.
        spec: the run as planned; None where it does not fit.
        refusal: why it does not fit, and which budget would do.
    """

    kind: str
    label: str
    spec: RunSpec | None
    refusal: str = ""

    @property
    def name(self) -> str:
        return join(" ", [say(self.kind), say(self.label)])

    def as_dict(self) -> dict[str, Any]:
        row = {"kind": self.kind, "label": self.label, "outcome": self.refusal}
        if self.spec is None:
            return {**row, "load_bytes": None, "peak_bytes": None, "seconds": None}
        plan = self.spec.plan
        return {**row, "load_bytes": plan.phases["load"], "peak_bytes": plan.peak_bytes, "seconds": plan.seconds}


def plan_cases(config: Config, machine: Machine) -> list[Case]:
    """The run's own step, and single rows of other lengths and with adapters of several ranks, each with its plan."""
    single_row = {"effective_batch_size": 1, "batch_size_per_gpu": 1, "gradient_accumulation_steps": AUTO}
    lengths = {int(config.data.max_seq_len * factor) for factor in LENGTH_FACTORS}
    lengths = {min(LONGEST_LENGTH, max(SHORTEST_LENGTH, length)) for length in lengths}
    optimizer = config.train.optimizer if config.given("optimizer") else "adamw"  # as a run takes for adapters
    variations: list[tuple[str, str, dict[str, Any]]] = [("step", "as planned", {})]
    for length in sorted(lengths):
        variations.append(("sequence length", str(length), {**single_row, "max_seq_len": length}))
    for rank in LORA_RANKS:
        variations.append(("LoRA rank", str(rank), {**single_row, "lora_rank": rank, "optimizer": optimizer}))
    objective = config.data.objective
    if objective == AUTO:
        objective = default_objective(config.train.is_finetune)
    cases = []
    for kind, label, changes in variations:
        # Samples at the end of a run would take time here, and no memory.
        case_config = config.changed(sample_rows=0, objective=objective, **changes)
        try:
            rows = Rows.as_set(case_config.data, objective, case_config.train.eval_rows)
            spec = resolve(case_config, machine, rows)
            cases.append(Case(kind, label, spec))
        except DoesNotFit as error:
            cases.append(Case(kind, label, None, say("does not fit: {need}", need=error.problems[-1])))
    return cases


def choose_case(cases: Sequence[Case]) -> Case | None:
    """The first case that can be measured in reasonable time; None: none can."""
    for case in cases:
        if case.spec is not None and probe_seconds(case.spec) <= MOST_PROBE_SECONDS:
            return case
    return None


def probe_seconds(spec: RunSpec) -> float:
    """About how long a probe of a plan takes, without the start of its process."""
    return STEPS_OF_PROBE * spec.plan.seconds


def measure_case(case: Case) -> dict[str, Any]:
    """Run steps of a case in a child process: the same fields as `Case.as_dict`, measured."""
    spec = case.spec
    assert spec is not None
    choice = spec.plan.choice
    num_rows = choice.batch_size_per_gpu * choice.gradient_accumulation_steps
    shapes = Shapes.longest(num_rows, spec.rows.source_tokens, spec.rows.target_tokens)
    steps = tuple(map(tuple, shapes.worst_steps(choice.batch_size_per_gpu, choice.micro_batches_per_pass)))
    evaluation = shapes.worst_steps(choice.eval_batch_size_per_gpu)[0][0]
    result = probe(ProbeRequest(spec.asked, choice, steps, evaluation), None, MOST_PROBE_SECONDS)
    phases = result.phases or {}
    return {
        "kind": case.kind,
        "label": case.label,
        "outcome": result.failed,
        "load_bytes": phases.get("load"),
        "peak_bytes": max(phases.values(), default=None),
        "seconds": result.step_seconds or None,
    }
