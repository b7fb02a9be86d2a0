"""The plan of a run: the first rung of `memory.ladder` that fits its budget.

A rung fits where its micro-batch holds all rows of the step, or so many that more would save less than 5% of the time. Only
where no rung does so, micro-batches are smaller. Modes low and ultra take the least memory that costs less than 5% of the
speed. The effective batch is never touched. A resumed run keeps its plan where it fits, and its dtypes where any plan does.

Times that decide are nominal ones of the machine's class, so that the same plan comes out on a quiet and on a busy machine;
measured ones are for the user. Formulas of memory and time are in `memory.estimate`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any

from language import english, say
from memory.advice import refusal
from memory.batch_size import effective_batch
from memory.estimate.peaks import STEP_PHASES, peak_of, predict
from memory.estimate.precision import QUANTIZED, Precision
from memory.estimate.shapes import Shapes
from memory.estimate.time import predict_seconds
from memory.estimate.weight_offload import pinned_bytes
from memory.estimate.workload import ExecutionPlan, Machine, Workload
from memory.ladder import Ladder, Rung
from memory.remarks import remarks_on
from memory.resumed_choice import choice_to_keep, on_this_machine, precision_to_keep
from memory.step_work import make_work
from memory.weights_in import WeightOffload
from settings.declared import Config
from settings.errors import DoesNotFit
from units import format_size

NEARLY = 1.05  # Times the seconds of the fastest plan that count as little.
SAVING_MODES = ("low", "ultra")
ROOMY = (
    0.8  # Share of the budget within which freed memory is kept for the next step: a little speed is not worth a probe.
)
BUDGET_STEP = 1.01  # Saving modes find the least budget to this factor.
KEPT = "as the run did before"


@dataclass(frozen=True)
class Plan:
    """The choice, what it is predicted to take, and why.

    Args:
        rung: its name.
        components: name -> bytes at the peak, largest first.
        phases: phase -> predicted peak bytes.
        seconds: predicted duration of a step, with measured speeds where there are any.
        num_blocks: of the model.
        phase_parts: phase -> name -> bytes, of every phase.
        unprobed_peak_bytes: what was predicted for this choice before a probe measured it; None: there was none.
        seconds_total, seconds_low, seconds_high: of the whole run from here on, see `memory.estimate.time`; None: its length
            is not known.
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

    @property
    def step_peak_bytes(self) -> int:
        """The predicted peak of a step, without loading, evaluating and saving."""
        return max(self.phases[phase] for phase in STEP_PHASES if phase in self.phases)

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


Choice = tuple[str, ExecutionPlan]  # Name of a rung, and an execution plan on it.


class Search:
    """Finds execution plans on a ladder; each is predicted once."""

    def __init__(self, ladder: Ladder) -> None:
        self._ladder = ladder
        self._work = ladder.work
        self._machine = ladder.machine
        self._budget = ladder.machine.budget_bytes
        self._num_blocks = ladder.work.model.num_layers + ladder.work.model.num_decoder_layers
        self._doubt = 1.5  # Nominal speeds may be off by so much.
        self.peak = cache(lambda plan: peak_of(predict(ladder.work, plan, ladder.machine))[1])
        self.seconds = cache(lambda plan: predict_seconds(ladder.work, plan, ladder.machine))

    def first_that_fits(self) -> Choice | None:
        """The first rung with a large enough micro-batch, or a faster plan above it; None: nothing fits.

        Last resorts are taken where nothing else fits or is nearly as fast.
        """
        rungs = list[Rung]()
        best: ExecutionPlan | None = None
        for rung in self._ladder.rungs:
            rungs.append(rung)
            plan = best if rung.is_last_resort else self.fastest_on(rung, self._budget, best)
            if plan is not None and plan is not best and self._is_large_enough(rung, plan):
                break
            best = plan
        last_resorts = (rung for rung in self._ladder.rungs[len(rungs) :] if rung.is_last_resort)
        return self.fastest([*rungs, *last_resorts], self._budget)

    def fastest(self, rungs: list[Rung], budget: int, most_seconds: float = math.inf) -> Choice | None:
        """The fastest plan of these rungs within a budget; of those that are as good, the one on the highest rung."""
        best: ExecutionPlan | None = None
        name = ""
        for rung in rungs:
            plan = self.fastest_on(rung, budget, best, most_seconds)
            if plan is not best:
                best = plan
                name = self._ladder.describe(rung)
        return None if best is None else (name, best)

    def fastest_on(
        self, rung: Rung, budget: int, best: ExecutionPlan | None = None, most_seconds: float = math.inf
    ) -> ExecutionPlan | None:
        """The fastest plan of a rung within a budget, where it is better than the best so far; else that one."""
        if not any(self._fits(plan, budget) for plan in self.smallest_on(rung)):
            return best
        families = self._ladder.families(rung)
        for family in sorted(families, key=lambda family: self.seconds(family[0])):
            if self.seconds(family[0]) > most_seconds or not self._is_better(family[0], best):
                break
            plan = self._first_within(family, budget)
            if plan is not None and self.seconds(plan) <= most_seconds and self._is_better(plan, best):
                best = plan
        return best

    def smallest_of_fast(self) -> Choice | None:
        """The fastest plan within the least budget that costs less than 5% of the speed; it stores weights as the fastest does."""
        result = self.fastest(self._ladder.rungs, self._budget)
        if result is None or result[1].offloaded_blocks:
            return result
        precision = result[1].precision
        rungs = [rung for rung in self._ladder.rungs if self._ladder.precision_of(rung) == precision]
        most_seconds = NEARLY * self.seconds(result[1])
        enough = self.peak(result[1])
        too_little = 0
        while enough > BUDGET_STEP * too_little:
            budget = (enough + too_little) // 2
            smaller = self.fastest(rungs, budget, most_seconds)
            if smaller is None:
                too_little = budget
            else:
                result = smaller
                enough = self.peak(smaller[1])
        return result

    def as_before(self, plan: ExecutionPlan) -> Choice | None:
        """The plan of the run that is resumed, with its weights where they fit now; None: it does not fit."""
        for family in self._ladder.as_before(plan):
            fitting = self._first_within(family, self._budget)
            if fitting is not None:
                return say(KEPT), fitting
        return None

    def smallest(self) -> ExecutionPlan | None:
        """The plan that takes the least memory; None where the RAM does not hold weights that are to be kept in it."""
        plans = [plan for rung in self._ladder.rungs for plan in self.smallest_on(rung) if self._is_in_ram(plan)]
        return min(plans, key=self.peak, default=None)

    def smallest_on(self, rung: Rung) -> list[ExecutionPlan]:
        """The plans of a rung of which one takes the least memory: micro-batches of the fewest rows, in more or fewer passes."""
        families = self._ladder.families(rung)
        rows = min(family[0].batch_size_per_gpu for family in families)
        return [family[-1] for family in families if family[0].batch_size_per_gpu == rows]

    def _first_within(self, family: list[ExecutionPlan], budget: int) -> ExecutionPlan | None:
        if not self._fits(family[-1], budget):
            return None
        plan = family[bisect_left(family, True, key=lambda plan: self._fits(plan, budget))]
        return plan if self._is_in_ram(plan) else None

    def _fits(self, plan: ExecutionPlan, budget: int) -> bool:
        share = ROOMY if plan.malloc == "untrimmed" else 1.0
        return self.peak(plan) <= share * budget

    def _is_in_ram(self, plan: ExecutionPlan) -> bool:
        host_bytes = self._machine.host_bytes  # 0: The device computes in the RAM, which is the budget itself.
        return not plan.offloaded_blocks or not host_bytes or pinned_bytes(self._work, plan) <= host_bytes

    def _is_large_enough(self, rung: Rung, plan: ExecutionPlan) -> bool:
        """Whether larger micro-batches would save less than 5% of the time."""
        alike = (replace(family[0], saved_blocks=plan.saved_blocks) for family in self._ladder.families(rung))
        return self.seconds(plan) <= NEARLY * min(map(self.seconds, alike))

    def _is_better(self, plan: ExecutionPlan, best: ExecutionPlan | None) -> bool:
        """Whether it takes less time and is no less exact.

        Weights are kept elsewhere where that saves more time than nominal speeds may be off. Any saving is enough beside an
        int8 base, and beside recomputation in several passes, each of which reads all weights twice.
        """
        if best is None:
            return True
        is_exact = plan.storage not in QUANTIZED
        was_exact = best.storage not in QUANTIZED
        if was_exact and not is_exact:
            return False
        is_poor = (is_exact and not was_exact) or (
            best.accumulation_passes > 1 and best.saved_blocks < self._num_blocks
        )
        doubt = 1.0 if is_poor or plan.weights_in == best.weights_in else self._doubt
        return doubt * self.seconds(plan) < self.seconds(best)


def plan(
    config: Config,
    machine: Machine,
    *,
    source_tokens: int | None = None,
    target_tokens: int | None = None,
    earlier: ExecutionPlan | None = None,
    anew: Collection[str] = (),
    precision: Precision | None = None,
    offload: WeightOffload | None = None,
    shapes: Shapes | None = None,
    evaluation: Shapes | None = None,
    mapped: tuple[str, int] = ("", 0),
) -> Plan:
    """Choose the first rung of the ladder that fits the machine's budget.

    Args:
        source_tokens, target_tokens: longest row that can occur; None: as the settings allow.
        earlier: the choice of the run that is resumed; kept where it fits, so that it computes in the same order; where it
            does not, its dtypes are, as long as any plan in them fits.
        anew: settings of the step that this start changes.
        precision: where it is decided already; None: the plan chooses.
        offload: likewise where weights are kept.
        shapes, evaluation: how long the rows of the run's steps, and of its evaluations, are; None: all the longest.
        mapped: of a frozen base, as `Workload` has it.
    Raises:
        DoesNotFit: no plan fits; names the least budget and the cheapest changes.
        UserError: the run that is resumed computes in what this device does not.
    """
    work = make_work(config, machine, source_tokens, target_tokens)
    work = replace(work, shapes=shapes, evaluation=evaluation, mapped=mapped)
    precisions = [precision]
    kept = None
    if earlier is not None:
        before = on_this_machine(config, machine, earlier)
        precision = precision_to_keep(config, machine, before)
        if precision is not None:
            precisions = [precision, None]
            kept = choice_to_keep(config, machine, work, before, anew)
    searches = [Search(Ladder(config, machine, work, each, offload)) for each in precisions]
    result = searches[0].as_before(kept) if kept is not None else None
    saves = config.memory.memory_mode in SAVING_MODES
    for search in searches:
        if result is None:
            result = search.smallest_of_fast() if saves else search.first_that_fits()
    if result is None:
        raise _does_not_fit(config, machine, work, searches[-1].smallest())
    name, choice = result
    phases = predict(work, choice, machine)
    highest, peak = peak_of(phases)
    num_blocks = work.model.num_layers + work.model.num_decoder_layers
    return Plan(
        choice,
        effective_batch(config, machine),
        machine.budget_bytes,
        peak,
        components=dict(sorted(phases[highest].items(), key=lambda item: -item[1])),
        phases={phase: sum(parts.values()) for phase, parts in phases.items()},
        seconds=predict_seconds(work, choice, machine.as_measured()),
        num_blocks=num_blocks,
        reasons=tuple(remarks_on(config, work, choice, machine, earlier, precision if earlier else None)),
        phase_parts=phases,
        rung=name,
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


def outcomes(config: Config, work: Workload, machine: Machine, chosen: Plan) -> list[RungOutcome]:
    """All rungs that settings and machine allow, beside the plan that was chosen."""
    ladder = Ladder(config, machine, work)
    search = Search(ladder)
    results = list[RungOutcome]()
    for rung in ladder.rungs:
        name = ladder.describe(rung)
        plan = search.fastest_on(rung, machine.budget_bytes)
        if name == chosen.rung:
            plan = chosen.choice
        shown = plan or min(search.smallest_on(rung), key=search.peak)
        seconds = predict_seconds(work, shown, machine.as_measured())
        results.append(RungOutcome(name, search.peak(shown), seconds, plan is not None, name == chosen.rung))
    return results


def _does_not_fit(config: Config, machine: Machine, work: Workload, least: ExecutionPlan | None) -> DoesNotFit:
    if least is None:
        return DoesNotFit(
            "--weights_in = {weights_in}, does not fit into {size} of RAM beside the device; choose another "
            "place, or omit it",
            weights_in=config.memory.weights_in,
            size=format_size(machine.host_bytes),
        )

    def least_peak(changed: Config) -> int:
        source = min(work.source_tokens, changed.data.max_seq_len)
        target = min(work.target_tokens, make_work(changed, machine, source, None).target_tokens)
        other = make_work(changed, machine, source, target)
        if changed.data.max_seq_len == config.data.max_seq_len:
            other = replace(other, evaluation=work.evaluation, shapes=work.shapes if other.rows == work.rows else None)
        search = Search(Ladder(changed, machine, other))
        smallest = search.smallest()
        return machine.budget_bytes + 1 if smallest is None else search.peak(smallest)

    return DoesNotFit(*refusal(config, machine, work, least, least_peak))
