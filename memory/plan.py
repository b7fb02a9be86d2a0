"""The plan of a run: whether it fits, and the fastest way that does.

`plan` lists the ways a step can run (micro-batches together or one after another, saved blocks, dtype of the stored weights),
drops those whose predicted peak is over the budget, and takes the fastest of the rest (weights elsewhere, or in more parts, only where
that is clearly faster); in modes low and ultra the smallest of
those that are nearly as fast. The effective batch is never touched. The formulas are in `memory.estimate.peaks`.
Speeds in this choice are the nominal ones of the machine's class, so that the same plan comes out on a quiet and on a busy
machine; those that were measured tell times. A run that is resumed computes in what it began with.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

from language import english, say
from limits import MALLOCS
from memory.batch_size import effective_batch
from memory.candidates import as_asked, candidates, kernels_of, make_work, scores_of
from memory.changes import refusal
from memory.estimate.peaks import STEP_PHASES, peak_of, predict
from memory.estimate.precision import FLOAT16, QUANTIZED, Precision, asked_precision
from memory.estimate.shapes import Shapes
from memory.estimate.time import pace_of, predict_seconds, typical_seconds
from memory.estimate.workload import ExecutionPlan, Machine, Workload
from memory.reasons import (
    dtype_reasons,
    kernel_reasons,
    mapped_reasons,
    offload_reasons,
    optimizer_reasons,
    size_reasons,
)
from memory.weight_offload import WeightOffload, offloaded_candidates, weights_in_to_try
from settings.declared import Config
from settings.errors import DoesNotFit, UserError
from settings.fields import AUTO
from units import format_size

Rank = tuple[bool, float]  # the least is taken; see `_rank`
NEARLY = 1.05  # times the seconds of the fastest that count as little
SAVING_MODES = ("low", "ultra")  # which give that for the least memory; ultra stores in bf16 and recomputes all before
ROOMY = 0.8  # share of the budget up to which freed memory is kept for the next step: a little speed is no reason for a probe


@dataclass(frozen=True)
class Plan:
    """The choice, what it is predicted to take, and why.

    Args:
        components: name -> bytes at the peak, largest first. phases: phase -> predicted peak bytes.
        seconds: predicted duration of a step, with measured speeds where there are any. num_blocks: of the model.
        phase_parts: phase -> name -> bytes, of every phase.
        unprobed_peak_bytes: what was predicted for this choice before a probe measured it; None: there was none.
        seconds_total, seconds_low, seconds_high: of the whole run from here on, see `memory.estimate.time`; None: its length is
            not known.
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

    @property
    def step_peak_bytes(self) -> int:
        """The predicted peak of a step, without loading, evaluating and saving."""
        return max(self.phases[phase] for phase in STEP_PHASES if phase in self.phases)

    def recomputed(self) -> str:
        """In words, how many blocks backward recomputes: all but those that are saved."""
        count, total = self.num_blocks - self.choice.saved_blocks, self.num_blocks
        return say("{count} of {total} blocks recomputed", count=count, total=total)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            **asdict(self),
            "reasons": [english(reason) for reason in self.reasons],
            "gradient_accumulation_steps": self.choice.gradient_accumulation_steps,
        }


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
    """Choose the fastest way to run this configuration that fits the machine's budget.

    Args:
        source_tokens, target_tokens: longest row that can occur; None: as the settings allow.
        earlier: the choice of the run that is resumed; kept where it fits, so that it computes in the same order; where it
            does not, its precision is, as long as any way in it fits. anew: settings of the step that ask for another.
        precision: where it is settled; None: the plan chooses. offload: likewise where weights are kept.
        shapes, evaluation: how long the rows of the run's steps, and of its evaluations, are; None: all the longest.
        mapped: of a frozen base, as `Workload` has it.
    Raises:
        DoesNotFit: no way fits; names the least peak and the cheapest changes.
        UserError: the run that is resumed computes in what this device does not.
    """
    work = make_work(config, machine, source_tokens, target_tokens)
    work = replace(work, shapes=shapes, evaluation=evaluation, mapped=mapped)
    had_kernels = earlier is not None and earlier.kernels
    if earlier is not None:
        # a run that comes from a GPU had none to use, and none of its bits are kept here anyway
        may_have = (
            had_kernels or config.run.compiled_kernels is True or (earlier.scores > 0 and not machine.pads_attention)
        )
        scores = (earlier.scores or scores_of(machine)) if machine.pads_attention else 0
        earlier = replace(earlier, kernels=may_have and kernels_of(config, machine), scores=scores)
    began = _precision_of(config, machine, earlier) if earlier else None
    way = as_asked(config, machine, earlier, anew) if earlier and began else None
    kept = [way] if way and _goes_on(work, way) else []
    kept += [replace(way, malloc="fast") for way in kept if way.malloc == "untrimmed"]  # computes alike in less room
    ways, fastest = _search(config, machine, work, [began, None] if began else [precision], kept, offload)
    saves = config.memory.memory_mode in SAVING_MODES
    chosen = _smallest_of_fast(work, machine, ways, fastest) if saves else fastest
    phases = predict(work, chosen, machine)
    highest, peak = peak_of(phases)
    num_blocks = work.model.num_layers + work.model.num_decoder_layers
    missing = "" if config.run.compiled_kernels is False else machine.no_kernels
    return Plan(
        chosen,
        effective_batch(config, machine),
        machine.budget_bytes,
        peak,
        components=dict(sorted(phases[highest].items(), key=lambda item: -item[1])),
        phases={phase: sum(parts.values()) for phase, parts in phases.items()},
        seconds=typical_seconds(work, chosen, machine.as_measured()),
        num_blocks=num_blocks,
        reasons=(
            *size_reasons(config, chosen, machine),
            *optimizer_reasons(config, work, chosen, machine),
            *offload_reasons(chosen, num_blocks),
            *mapped_reasons(work, chosen, machine),
            *dtype_reasons(config, chosen, machine, began),
            *kernel_reasons(chosen, had_kernels, missing),
        ),
        phase_parts=phases,
    )


def _search(
    config: Config,
    machine: Machine,
    work: Workload,
    precisions: list[Precision | None],
    kept: list[ExecutionPlan],
    offload: WeightOffload | None,
) -> tuple[list[ExecutionPlan], ExecutionPlan]:
    """The candidates among which the one to take was found, and that one.

    The fastest of the simplest that fit: weights where they are computed, then in RAM, then in a file; a step in one part, then in
    several. Others are taken where they are clearly faster.

    Args:
        precisions: each is left only where nothing else fits.
        kept: candidates that are tried first in each place.
    Raises:
        DoesNotFit: none fits.
    """
    tried: dict[tuple[Any, ...], ExecutionPlan] = {}
    best: ExecutionPlan | None = None
    among: list[ExecutionPlan] = []
    tried_in = weights_in_to_try(config, machine, offload)
    for precision in precisions:
        for parted in (False, True):
            ways = list(candidates(config, machine, work, precision, parted=parted))
            for weights_in, (base, is_parted) in product(tried_in, ((kept, True), (ways, parted))):
                is_worth = partial(_is_worth, work, machine, best)
                here = offloaded_candidates(
                    weights_in, config, machine, work, base, offload, parted=is_parted, is_worth=is_worth
                )
                if (found := _fastest(work, machine, here, is_worth)) is None:
                    tried |= {} if best else _smallest(here)
                    continue
                best, among = found, here
                if base is kept:
                    return among, best
        if best is not None:
            return among, best
        kept = []
    if not tried:  # All weights were to be kept in RAM, which does not hold them.
        raise DoesNotFit(
            "--weights_in = {weights_in}, does not fit into {size} of RAM beside the device; choose another "
            "place, or omit it",
            weights_in=config.memory.weights_in,
            size=format_size(machine.host_bytes),
        )
    least = min(tried.values(), key=lambda way: _peak(work, way, machine))
    raise DoesNotFit(*refusal(config, work, machine, least))


def _smallest(ways: list[ExecutionPlan]) -> dict[tuple[Any, ...], ExecutionPlan]:
    """Of the ways that differ only in what always takes more memory, the one that takes the least."""

    def least_last(way: ExecutionPlan) -> tuple[int, ...]:
        return way.offloaded_blocks, -way.saved_blocks, -way.loss_chunk_bytes, -MALLOCS.index(way.malloc)

    return {_kind(way): way for way in sorted(ways, key=least_last)}


def _kind(way: ExecutionPlan) -> tuple[Any, ...]:
    cut = way.batch_size_per_gpu, way.accumulation_passes
    return *cut, way.storage, way.compute, way.weights_in


def _families(ways: list[ExecutionPlan]) -> list[list[ExecutionPlan]]:
    """Ways that differ in saved blocks, or in those elsewhere, alone: each family from the fastest, which takes the most, to the slowest."""
    families: dict[ExecutionPlan, list[ExecutionPlan]] = {}
    for way in ways:
        families.setdefault(replace(way, saved_blocks=0, offloaded_blocks=0), []).append(way)
    return [sorted(family, key=lambda way: (-way.saved_blocks, way.offloaded_blocks)) for family in families.values()]


def _fastest(
    work: Workload, machine: Machine, ways: list[ExecutionPlan], is_worth: Callable[[ExecutionPlan], bool]
) -> ExecutionPlan | None:
    """The first of the fastest ways that fit and are worth it; None where there is none.

    Families are looked at from the fastest on, until what is left cannot be faster.
    """
    smallest, has_room = _smallest(ways), dict[tuple[Any, ...], bool]()
    best: tuple[Rank, int] | None = None
    found: ExecutionPlan | None = None
    families = _families(ways)
    for rank, number in sorted((_rank(family[0], work, machine), number) for number, family in enumerate(families)):
        if best is not None and (rank, number) >= best:
            break
        family, kind = families[number], _kind(families[number][0])
        if not is_worth(family[0]):
            continue
        if kind not in has_room:
            has_room[kind] = _peak(work, smallest[kind], machine) <= machine.budget_bytes
        first = _first_that_fits(work, machine, family) if has_room[kind] else None
        if first is None:
            continue
        rank = _rank(first, work, machine)
        if (best is None or (rank, number) < best) and is_worth(first):
            best, found = (rank, number), first
    return found


def _is_worth(work: Workload, machine: Machine, best: ExecutionPlan | None, way: ExecutionPlan) -> bool:
    """Whether a way is to be taken in place of a simpler one: no less exact, and faster, by more than nominal speeds may be off
    where its weights come from elsewhere."""
    if best is None:
        return True
    is_exact = way.storage not in QUANTIZED or best.storage in QUANTIZED
    doubt = NEARLY if way.weights_in == best.weights_in else 1 + pace_of(machine.speed_class).nominal_spread
    return is_exact and doubt * predict_seconds(work, way, machine) < predict_seconds(work, best, machine)


def _first_that_fits(work: Workload, machine: Machine, family: list[ExecutionPlan]) -> ExecutionPlan | None:
    room = machine.budget_bytes * (ROOMY if family[0].malloc == "untrimmed" else 1.0)  # of all of a family
    at = bisect_left(family, True, key=lambda way: _peak(work, way, machine) <= room)
    return family[at] if at < len(family) else None


def _smallest_of_fast(
    work: Workload, machine: Machine, ways: list[ExecutionPlan], fastest: ExecutionPlan
) -> ExecutionPlan:
    """Of the ways that are nearly as fast as the fastest that fits, and store weights like it, the one that takes the least."""
    alike = [way for way in ways if way.storage == fastest.storage]
    if fastest.offloaded_blocks:  # no more of them than it takes
        fewest = (_first_that_fits(work, machine, family) for family in _families(alike))
        alike = [way for way in fewest if way is not None]
    # of the rows as long as they are: a few short ones make small products, which are slow
    most = NEARLY * typical_seconds(work, fastest, machine)
    fast = [way for way in alike if typical_seconds(work, way, machine) <= most]
    return min(fast, key=lambda way: _peak(work, way, machine))


def _peak(work: Workload, choice: ExecutionPlan, machine: Machine) -> int:
    return peak_of(predict(work, choice, machine))[1]


def _rank(choice: ExecutionPlan, work: Workload, machine: Machine) -> Rank:
    """int8 and int4, which change numbers, last; then the fastest."""
    return choice.storage in QUANTIZED, predict_seconds(work, choice, machine)


def _goes_on(work: Workload, choice: ExecutionPlan) -> bool:
    rows = choice.batch_size_per_gpu * choice.gradient_accumulation_steps
    is_bound = work.step_shapes.max_tokens is not None  # by tokens: then there are more of them
    return rows >= work.rows and (is_bound or work.rows > rows - choice.batch_size_per_gpu)


def _precision_of(config: Config, machine: Machine, earlier: ExecutionPlan) -> Precision | None:
    precision = earlier.precision
    asked = asked_precision(config, machine.multiplies_fast)
    if asked not in (AUTO, precision.mixed_precision) and not config.lora.lora_rank:
        return None
    if precision.compute == FLOAT16 and not machine.rate("float16"):
        raise UserError(
            "--is_keep_training = True, the run computes in fp16, which is not trained in on this device; allowed: a GPU "
            "with fp16 tensor cores; resume it there, or start another run with --mixed_precision=auto"
        )
    return precision
