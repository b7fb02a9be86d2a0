"""The plan of a run: the first rung of `memory.ladder` that fits its budget, unless one below it is clearly faster.

A rung below is faster where only there micro-batches are large enough. Modes low and ultra take the least memory that
costs less than 5% of the speed. The effective batch is never touched. A resumed run keeps its plan where it fits, and
its dtypes where any plan does.

Times that decide are nominal ones of the machine's class, so that the same plan comes out on a quiet and on a busy
machine; measured ones are for the user. Formulas of memory and time are in `memory.estimate`.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

from memory.advice import changes, refusal
from memory.estimate.peaks import peak_of, predict
from memory.estimate.shapes import Shapes
from memory.estimate.time import predict_seconds
from memory.estimate.weight_offload import pinned_bytes
from memory.estimate.workload import ExecutionPlan, Machine, Workload
from memory.ladder import Ladder, Rung
from memory.remarks import remarks_on
from memory.resumed_choice import choice_to_keep, precision_to_keep
from memory.step_settings import StepSettings
from memory.step_work import effective_batch, make_work, why_not_compiled
from settings.declared import Config
from settings.errors import DoesNotFit, UserError
from support.language import english, say
from support.units import format_size

NEARLY = 1.05  # Times the seconds of the fastest plan that count as little.
# Weights are offloaded for speed only where a step becomes so many times faster: nominal speeds may be that wrong.
OFFLOAD_GAIN = 1.5
SAVING_MODES = ("low", "ultra")
# Share of the budget within which freed memory is kept for the next step: a little speed is not worth a probe.
ROOMY = 0.8
AS_BEFORE = "as the run did before"


@dataclass(frozen=True)
class Plan:
    """The choice, what it is predicted to take, and why.

    Args:
        components: name -> bytes at the peak, largest first.
        phases: phase -> predicted peak bytes.
        seconds: predicted duration of a step, with measured speeds where there are any.
        num_blocks: of the model.
        phase_parts: phase -> name -> bytes, of every phase.
        unprobed_peak_bytes: what was predicted for this choice before a probe measured it; None: there was none.
        seconds_total, seconds_low, seconds_high: of the whole run from here on, see `memory.estimate.time`; None: its
            length is not known.
        rung: its name.
    """

    choice: ExecutionPlan
    effective_batch_size: int
    budget_bytes: int
    peak_bytes: int
    components: dict[str, int]
    phases: dict[str, int]
    seconds: float
    num_blocks: int
    reasons: tuple[str, ...] = ()
    phase_parts: dict[str, dict[str, int]] = field(default_factory=dict)
    unprobed_peak_bytes: int | None = None
    seconds_total: float | None = None
    seconds_low: float | None = None
    seconds_high: float | None = None
    rung: str = ""

    def recomputed(self) -> str:
        """In words, how many blocks backward recomputes: all but those that are saved."""
        count = self.num_blocks - self.choice.saved_blocks
        return say("{count} of {total} blocks recomputed", count=count, total=self.num_blocks)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            **asdict(self),
            "rung": english(self.rung),
            "reasons": [english(reason) for reason in self.reasons],
            "gradient_accumulation_steps": self.choice.gradient_accumulation_steps,
        }


class Candidate(NamedTuple):
    """An execution plan, and the rung that it is on."""

    rung: Rung
    plan: ExecutionPlan


class Search:
    """Compares the execution plans of a ladder; each is predicted once."""

    def __init__(self, ladder: Ladder) -> None:
        self._ladder = ladder
        self.rungs = ladder.rungs
        self.peak = cache(lambda plan: peak_of(predict(ladder.work, plan, ladder.machine))[1])
        self.seconds = cache(lambda plan: predict_seconds(ladder.work, plan, ladder.machine))

    def choose(self, saves: bool) -> Candidate | None:
        """The first rung that fits, unless one below it makes a step over 5% faster; None: nothing fits.

        Args:
            saves: whether to take the least memory that costs less than 5% of the speed.
        """
        best: Candidate | None = None
        most_seconds = math.inf
        for rung in self.rungs:
            if best is not None:
                if rung.is_quantized and not best.rung.is_quantized:
                    continue  # A base in 8 bits is less exact: it is the last means.
                gain = 1.0 if saves else NEARLY
                if rung.weights_in != best.rung.weights_in and best.plan.accumulation_passes == 1:
                    gain = OFFLOAD_GAIN
                most_seconds = self.seconds(best.plan) / gain
            plan = self.fastest_on(rung, most_seconds)
            if plan is not None:
                best = Candidate(rung, plan)
        if best is None or not saves:
            return best
        alike = [rung for rung in self.rungs if rung.precision == best.rung.precision]
        smallest = self.smallest(alike, NEARLY * self.seconds(best.plan))
        return smallest if smallest is not None and self._fits(smallest.plan) else best

    def fastest_on(self, rung: Rung, most_seconds: float = math.inf) -> ExecutionPlan | None:
        """The fastest plan of a rung that fits and takes less time than that; None: there is none."""
        fastest: ExecutionPlan | None = None
        if not any(map(self._fits, self.plans_of_least(rung))):
            return None
        for family in sorted(self._ladder.families(rung), key=lambda family: self.seconds(family[0])):
            if self.seconds(family[0]) >= most_seconds:
                break
            plan = self.first_within(family)
            if plan is not None and self.seconds(plan) < most_seconds:
                fastest = plan
                most_seconds = self.seconds(plan)
        return fastest

    def first_within(self, family: Sequence[ExecutionPlan]) -> ExecutionPlan | None:
        """The fastest plan of a family that fits: in the budget, and offloaded weights in the RAM."""
        if not self._fits(family[-1]):
            return None
        plan = family[bisect_left(family, True, key=self._fits)]
        return plan if self._is_in_ram(plan) else None

    def smallest(self, rungs: Sequence[Rung], most_seconds: float = math.inf) -> Candidate | None:
        """The plan of these rungs that takes the least memory and not more time; None: there is none."""
        candidates = [
            Candidate(rung, plan)
            for rung in rungs
            for plan in self.plans_of_least(rung, most_seconds)
            if self._is_in_ram(plan)
        ]
        return min(candidates, key=lambda candidate: self.peak(candidate.plan), default=None)

    def plans_of_least(self, rung: Rung, most_seconds: float = math.inf) -> list[ExecutionPlan]:
        """Plans of a rung of which one takes the least memory: more rows are worth it where they let more be
        recomputed.
        """
        plans = list[ExecutionPlan]()
        ends = list[tuple[tuple[str, bool], int, int]]()
        for family in self._ladder.families(rung):
            plan = family[0]
            kind = plan.malloc, plan.accumulation_passes > 1
            rows = plan.batch_size_per_gpu * plan.micro_batches_per_pass
            end = bisect_right(family, most_seconds, key=self.seconds)
            if end and not any(kind == other and rows >= fewer and end <= later for other, fewer, later in ends):
                plans.append(family[end - 1])
                ends.append((kind, rows, end))
        return plans

    def _fits(self, plan: ExecutionPlan) -> bool:
        share = ROOMY if plan.malloc == "untrimmed" else 1.0
        return self.peak(plan) <= share * self._ladder.machine.budget_bytes

    def _is_in_ram(self, plan: ExecutionPlan) -> bool:
        host_bytes = self._ladder.machine.host_bytes  # 0: The device computes in the RAM, which is the budget itself.
        return not plan.offloaded_blocks or not host_bytes or pinned_bytes(self._ladder.work, plan) <= host_bytes


def plan(
    config: Config,
    machine: Machine,
    *,
    source_tokens: int | None = None,
    target_tokens: int | None = None,
    earlier: ExecutionPlan | None = None,
    changed: Collection[str] = (),
    running: ExecutionPlan | None = None,
    shapes: Shapes | None = None,
    evaluation: Shapes | None = None,
    mapped: tuple[str, int] = ("", 0),
    steps: int | None = None,
    settings: StepSettings | None = None,
) -> Plan:
    """Choose how a step is done within the machine's budget.

    Args:
        source_tokens, target_tokens: longest row that can occur; None: as the settings allow.
        earlier: the choice of the run that is resumed; kept where it fits, so that it computes in the same order; where
            it does not, its dtypes are, as long as any plan in them fits.
        changed: settings of the step that this start changes.
        running: the choice of a run that is under way, whose dtypes and offloaded weights stay; None: it has not begun.
        shapes, evaluation: how long the rows of the run's steps, and of its evaluations, are; None: all the longest.
        mapped, steps: as `Workload` has them.
        settings: that stand over what `config` fixes of a step; None: it alone counts.
    Raises:
        DoesNotFit: no plan fits; names the least budget and the cheapest changes.
        UserError: the run that is resumed computes in what this device does not.
    """
    settings = settings or StepSettings.of(config)
    work = make_work(config, machine, source_tokens, target_tokens)
    work = replace(work, shapes=shapes, evaluation=evaluation, mapped=mapped, steps=steps)
    ladders = [Ladder(settings, machine, work, running.precision if running else None, running)]
    earlier_precision = None
    choice = None
    rung: str = say(AS_BEFORE)
    if earlier is not None:
        earlier_precision = precision_to_keep(settings, machine, earlier)
        if earlier_precision is not None:
            ladders.insert(0, Ladder(settings, machine, work, earlier_precision))
            before = choice_to_keep(settings, machine, work, earlier, changed)
            families = ladders[0].as_before(before) if before else []
            choice = next(filter(None, map(Search(ladders[0]).first_within, families)), None)
    if choice is None:
        saves = settings.memory_mode in SAVING_MODES
        candidate = next(filter(None, (Search(ladder).choose(saves) for ladder in ladders)), None)
        if candidate is None:
            raise _does_not_fit(config, settings, ladders[-1])
        choice = candidate.plan
        rung = candidate.rung.describe()
    if settings.compile is True and not choice.compiled:
        raise UserError(
            "--compile = True, is not possible here: {reason}; omit it",
            reason=why_not_compiled(machine, work, choice),
        )
    phases = predict(work, choice, machine)
    # Gradients are held where that costs no memory: then a step that is not finite changes no weight. Offloaded weights
    # are updated in backward, which has just brought them.
    holding = replace(choice, hold_gradients=True)
    holding_phases = predict(work, holding, machine)
    if not choice.offloaded_blocks and peak_of(holding_phases)[1] <= peak_of(phases)[1]:
        choice = holding
        phases = holding_phases
    highest, peak = peak_of(phases)
    rows = effective_batch(config.train, machine)
    return Plan(
        choice,
        rows,
        machine.budget_bytes,
        peak,
        components=dict(sorted(phases[highest].items(), key=lambda item: -item[1])),
        phases={phase: sum(parts.values()) for phase, parts in phases.items()},
        seconds=predict_seconds(work, choice, machine.as_measured()),
        num_blocks=work.model.num_layers + work.model.num_decoder_layers,
        reasons=tuple(remarks_on(settings, work, choice, machine, rows, earlier, earlier_precision)),
        phase_parts=phases,
        rung=rung,
    )


@dataclass(frozen=True)
class RungOutcome:
    """What a plan finds on one rung of the ladder.

    Args:
        name: of the rung.
        peak_bytes, seconds: of its fastest plan that fits; where none fits, of the one that takes the least memory.
        fits: whether the budget holds it.
        is_chosen: whether the plan is on it.
    """

    name: str
    peak_bytes: int
    seconds: float
    fits: bool
    is_chosen: bool


def outcomes(settings: StepSettings, work: Workload, machine: Machine, chosen: Plan) -> list[RungOutcome]:
    """All rungs that settings and machine allow, beside the plan that was chosen."""
    ladder = Ladder(settings, machine, work)
    search = Search(ladder)
    results = list[RungOutcome]()
    for rung in ladder.rungs:
        name = rung.describe()
        is_chosen = name == chosen.rung
        plan = chosen.choice if is_chosen else search.fastest_on(rung)
        smallest = min(search.plans_of_least(rung), key=search.peak)
        seconds = predict_seconds(work, plan or smallest, machine.as_measured())
        results.append(RungOutcome(name, search.peak(plan or smallest), seconds, plan is not None, is_chosen))
    return results


def _does_not_fit(config: Config, settings: StepSettings, ladder: Ladder) -> DoesNotFit:
    machine = ladder.machine
    work = ladder.work
    least = Search(ladder).smallest(ladder.rungs)
    if least is None:
        return DoesNotFit(
            "--weights_in = {weights_in}, does not fit into {size} of RAM beside the device; choose another "
            "place, or omit it",
            weights_in=settings.weights_in,
            size=format_size(machine.host_bytes),
        )
    needs = list[tuple[str, int]]()
    for label, other in changes(config, least.plan, effective_batch(config.train, machine)):
        source = min(work.source_tokens, other.data.max_seq_len)
        target = min(work.target_tokens, make_work(other, machine, source, None).target_tokens)
        changed = make_work(other, machine, source, target)
        if other.data.max_seq_len == config.data.max_seq_len:
            shapes = work.shapes if changed.rows == work.rows else None
            changed = replace(changed, evaluation=work.evaluation, shapes=shapes)
        search = Search(Ladder(StepSettings.of(other), machine, changed))
        smallest = search.smallest(search.rungs)
        if smallest is not None:
            needs.append((label, search.peak(smallest.plan)))
    return DoesNotFit(*refusal(machine, work, least.plan, needs))
