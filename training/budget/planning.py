"""Which plan does a run get? What this machine offers and what the run needs, handed to `memory.plan`; then the probe.

The lengths of the rows that the run will see are looked up before, so that the plan is made for the worst batch that
comes. Where the plan is near the budget, `memory.probe` measures its worst steps, and the plan is made again with what
was measured.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from data.batches.step_lengths import StepLengths, evaluation_lengths, step_lengths
from devices.base import Device, name_of
from devices.kernels.calls import kernels
from devices.measuring import known_speed, measure
from memory.cost.duration import predict_times, schedule_of
from memory.cost.prediction import CORRECTION, Choice, Machine
from memory.cost.shapes import Shapes
from memory.cost.work import choice_fields
from memory.first_guess import effective_batch
from memory.observe.budget import FLAG, Budget, free_host_bytes
from memory.plan import Dtypes, Plan, make_work, plan
from memory.probe import ProbeData, ProbeRequest, ProbeResult, correction_of, probe
from settings.fields import AUTO, DoesNotFit
from training.processes.launch import local_rank, rank
from training.start.schedules import resolve_steps
from training.start.startup import Start
from units import MIB, format_size

PROBE_FROM = 0.85  # share of the budget from which a plan is probed with probe=auto
MOST_PROBES = 3  # each may lead to another plan, which is then probed in turn
Ahead = tuple[Shapes, Shapes]  # of the run's steps, and of its evaluation
AFTER_A_KILL = 1.15  # factor on temporary memory, where the probe was killed and so told nothing but that


def make_plan(
    begin: Start,
    device: Device,
    budget: Budget,
    base_bytes: int,
    num_processes: int,
    *,
    ahead: Ahead | None = None,
    dtypes: Dtypes | None = None,
    may_probe: bool = False,
) -> Plan:
    """Choose micro-batch, saved blocks and dtypes; a resumed run keeps its choice where it still fits.

    Args:
        base_bytes: what the process takes already. ahead: from `look_ahead`; None: it looks.
        dtypes: of weights and products, of a run that continues in another way; None: as the settings and the device say.
        may_probe: whether a child process may measure the plan: before the run holds anything, as `--probe` says.
    Raises:
        DoesNotFit: no way fits the budget.
    """
    machine = machine_of(device, budget, base_bytes, num_processes)
    shapes, evaluation = ahead or shapes_of(begin, machine)
    choice = begin.state.choice
    planner = _Planner(begin, machine, shapes, evaluation, dtypes)
    chosen = planner.plan(Choice(**choice_fields(choice)) if choice else None)
    if not may_probe:
        return planner.timed(chosen)
    asked = begin.config.memory.probe
    is_near = chosen.peak_bytes > PROBE_FROM * machine.budget_bytes
    # the child counts to the same budget and the same limits of the system
    beside = None if device.is_separate_memory else min(budget.host_bytes - base_bytes, free_host_bytes())
    fits_beside = beside is None or chosen.peak_bytes <= beside
    if asked is True or (asked == AUTO and is_near and fits_beside):
        chosen = planner.probed(chosen, beside)
    return planner.timed(chosen)


def look_ahead(begin: Start, device: Device, budget: Budget, num_processes: int) -> Ahead:
    """Lengths of the rows that come; and the first products, and their speed where no run has measured it.

    All of this loads libraries that stay: look before what the process takes is measured.
    """
    device.warm_up()
    if rank() == 0 and known_speed(device) is None:
        measure(device)
    return shapes_of(begin, machine_of(device, budget, 0, num_processes))


def machine_of(device: Device, budget: Budget, base_bytes: int, num_processes: int) -> Machine:
    """What the plan needs to know of this machine. Args as of `make_plan`."""
    separate = device.is_separate_memory and budget.device_bytes is not None
    known = known_speed(device)
    # with a budget that is named, what other programs hold does not change the run
    available = budget.available_bytes if budget.binding != FLAG else budget.installed_bytes or budget.available_bytes
    return Machine(
        budget_bytes=int(budget.device_bytes or 0) if separate else budget.host_bytes,
        available_bytes=available,
        base_bytes=0 if separate else base_bytes,
        rates=tuple((name_of(dtype), device.nominal_rate(dtype)) for dtype in device.rated_dtypes),
        speed_class=device.speed_class,
        measured=() if known is None else known.rates_with(device.threads),
        num_processes=num_processes,
        pads_attention=device.name == "cuda",
        widens_whole=device.name != "cpu",
        has_kernels=device.name == "cpu" and kernels() is not None,
        host_bytes=max(0, budget.host_bytes - base_bytes) if device.copies_beside else 0,
    )


def shapes_of(begin: Start, machine: Machine) -> Ahead:
    """Lengths of the rows of all steps that are to come, and of evaluation's."""
    config, rows = begin.config, effective_batch(begin.config, machine)
    resolved = resolve_steps(config, rows, begin.loader.num_rows)
    steps = range(begin.state.step, max(begin.state.step + 1, int(resolved.train.max_steps)))
    found = step_lengths(begin.loader, begin.prepared.train_dir, steps, rows, machine.num_processes)
    evaluation = evaluation_lengths(begin.validation, config.train.eval_rows, machine.num_processes)
    return _shapes(found, config.data.batch_tokens or None), _shapes(evaluation, None)


def _shapes(lengths: StepLengths, max_tokens: int | None) -> Shapes:
    return Shapes(lengths.sources, lengths.targets, lengths.is_complete, max_tokens)


class _Planner:
    """Plans one run on one machine, again and again as the probe tells more."""

    def __init__(
        self, begin: Start, machine: Machine, shapes: Shapes, evaluation: Shapes, dtypes: Dtypes | None = None
    ) -> None:
        self.begin, self.machine, self.shapes, self.evaluation = begin, machine, shapes, evaluation
        self.dtypes = dtypes

    def timed(self, chosen: Plan) -> Plan:
        """The plan with how long the run will take from here on."""
        begin, machine = self.begin, self.machine
        config = resolve_steps(begin.config, chosen.effective_batch_size, begin.loader.num_rows)
        longest = begin.validation.longest
        schedule = schedule_of(config, begin.state.step, begin.validation.num_rows, longest[1], machine.num_processes)
        work = replace(make_work(config, machine, *longest), shapes=self.shapes, evaluation=self.evaluation)
        total = predict_times(work, chosen.choice, machine, schedule).total()
        return replace(chosen, seconds_total=total.seconds, seconds_low=total.low, seconds_high=total.high)

    def plan(self, earlier: Choice | None) -> Plan:
        """The fastest plan that fits, or the earlier one where it still does."""
        source_tokens, target_tokens = map(max, self.begin.loader.longest, self.begin.validation.longest)
        return plan(
            self.begin.config, self.machine, source_tokens=source_tokens, target_tokens=target_tokens, earlier=earlier,
            dtypes=self.dtypes, shapes=self.shapes, evaluation=self.evaluation,
        )  # fmt: skip

    def probed(self, chosen: Plan, beside: int | None) -> Plan:
        """Measure a plan and plan again, until a plan fits that was measured.

        Args:
            beside: what a child may take beside this process; where the plan is above it, a smaller one is measured, and
                what its measurement tells of the formulas corrects the plan. None: the child's memory is another.
        """
        told: list[str] = []
        is_measured = False
        for _ in range(MOST_PROBES):
            trial = chosen if beside is None or chosen.peak_bytes <= beside else self._smaller(chosen, beside)
            if trial is None:
                told.append(f"not probed: a child process may take {format_size(beside or 0)}, too little for any step")
                break
            result = self._probe(trial)
            told.append(_told(result, trial))
            if result.failed and not result.was_killed:
                break  # it tells nothing of memory; the plan stands
            if result.was_killed:
                correction = self.machine.correction * AFTER_A_KILL
            else:
                correction, is_measured = correction_of(result, trial.phase_parts), True
                # what a smaller one takes less says nothing of this one; what it takes more does
                if trial is not chosen:
                    correction = max(correction, self.machine.correction)
            self.machine = replace(self.machine, correction=correction)
            before, chosen = chosen, self.plan(chosen.choice)
            if not result.was_killed and (chosen.choice == before.choice or trial is not before):
                break
        unprobed = sum(_uncorrected(chosen)) if is_measured else None
        return replace(chosen, reasons=(*chosen.reasons, *told), unprobed_peak_bytes=unprobed)

    def _smaller(self, chosen: Plan, most_bytes: int) -> Plan | None:
        """A plan with the same malloc that a child can measure within `most_bytes`; None: there is none."""
        machine = replace(self.machine, budget_bytes=most_bytes)
        smaller = _Planner(self.begin, machine, self.shapes, self.evaluation, self.dtypes)
        with suppress(DoesNotFit):
            trial = smaller.plan(None)
            return trial if trial.choice.malloc == chosen.choice.malloc else None
        return None

    def _probe(self, chosen: Plan) -> ProbeResult:
        choice = chosen.choice
        steps = self.shapes.worst_steps(choice.batch_size_per_gpu)
        evaluation = self.evaluation.worst_steps(choice.eval_batch_size_per_gpu)[-1]
        request = ProbeRequest(
            self.begin.config, choice, tuple(map(tuple, steps)), max(evaluation, key=lambda rows: sum(map(sum, rows))),
            self.begin.base, local_rank(), _data_of(self.begin),
        )  # fmt: skip
        if rank() != 0:
            return ProbeResult(failed="left to the first process, whose plan is taken by all")
        return probe(request, Path(self.begin.config.data.cache_dir))


def _data_of(begin: Start) -> ProbeData:
    made = begin.prepared
    return ProbeData(made.objective, made.train_dir, made.validation_dir, made.tokenizer_dir, begin.loader.reopens)


def _uncorrected(chosen: Plan) -> list[int]:
    """The parts of the highest phase as they were predicted before any probe."""
    phases = [[size for name, size in parts.items() if name != CORRECTION] for parts in chosen.phase_parts.values()]
    return max(phases, key=sum)


def _told(result: ProbeResult, chosen: Plan) -> str:
    if result.phases is None:
        return f"probe: {result.failed}, after {result.seconds:.0f} s"
    when = "known from an earlier probe" if result.is_cached else f"in {result.seconds:.0f} s"
    above = (max(result.phases.values()) - result.base_bytes) / MIB
    return f"probe: {above:.0f} MiB above the process itself, {when}; the plan was {format_size(chosen.peak_bytes)}"
