"""What will a run do on this machine? What it offers and what the run needs, handed to `resolve`; then the probe.

The lengths of the rows that the run will see are looked up before, so that the plan is made for the worst batch that
comes. Where the plan is near the budget, `memory.probe` measures its worst steps, and the plan is made again with what
was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from devices.base import Device, name_of, traits_of
from devices.kernels.calls import kernels, why_none
from devices.machine_file import disk_rates
from language import say
from memory.budget import FLAG, Budget
from memory.candidates import newly_asked
from memory.estimate.peaks import CORRECTION, predict
from memory.estimate.precision import Precision
from memory.estimate.workload import ExecutionPlan, Machine, choice_fields
from memory.homes import Homes, weights_folder
from memory.observe.system_limits import free_host_bytes
from memory.plan import Plan
from memory.probe import ProbeData, ProbeRequest, ProbeResult, correction_of, for_later_steps, probe
from settings.errors import DoesNotFit
from settings.fields import AUTO
from training.processes.launch import local_rank, rank
from training.start.resolving import Rows, RunSpec, resolve
from training.start.startup import Start
from units import MIB, format_size

PROBE_FROM = 0.85  # share of the budget from which a plan is probed with probe=auto
MOST_PROBES = 3  # each may lead to another plan, which is then probed in turn
AFTER_A_KILL = 1.15  # factor on temporary memory, where the probe was killed and so told nothing but that


def resolve_here(
    begin: Start,
    device: Device,
    budget: Budget,
    base_bytes: int,
    num_processes: int,
    *,
    rows: Rows | None = None,
    precision: Precision | None = None,
    homes: Homes | None = None,
    correction: float = 1.0,
    may_probe: bool = False,
) -> RunSpec:
    """Decide all that is auto, for this machine and as the probe has measured; a run that goes on keeps its choice where it
    still fits.

    Args:
        base_bytes: what the process takes already. rows: from `look_ahead`; None: it looks.
        precision: of a run that continues in another way; None: as the settings and the device say.
        homes: where its weights rest, likewise. correction: what a probe has found of the formulas.
        may_probe: whether a child process may measure the plan: before the run holds anything, as `--probe` says.
    Raises:
        DoesNotFit: no way fits the budget.
    """
    machine = machine_of(device, budget, base_bytes, num_processes, weights_folder(begin.config))
    machine = replace(machine, correction=correction)
    rows = rows or rows_of(begin, machine)

    def decide(on: Machine, earlier: ExecutionPlan | None, anew: Collection[str] = ()) -> RunSpec:
        """By the fastest plan that fits, or the earlier one where it still does and no setting asks for another."""
        return resolve(
            begin.config, on, rows, done=begin.state.step, earlier=earlier, anew=anew, precision=precision, homes=homes
        )

    earlier = begin.state.choice
    spec = decide(
        machine,
        ExecutionPlan(**choice_fields(earlier)) if earlier else None,
        newly_asked(begin.config, begin.state.asked),
    )
    asked = begin.config.memory.probe
    # steps of a model that is larger than the memory take minutes, and nearly all of its memory are weights, which are counted
    is_near = spec.plan.peak_bytes > PROBE_FROM * machine.budget_bytes and not spec.plan.choice.away_blocks
    if not may_probe or asked is False or (asked == AUTO and not is_near):
        return spec
    # the child counts to the same budget and the same limits of the system
    beside = None if budget.is_on_device else min(budget.limit() - base_bytes, free_host_bytes())
    return _probed(begin, spec, rows, beside, decide)


def look_ahead(begin: Start, device: Device, budget: Budget, num_processes: int) -> Rows:
    """The rows that come; and the first products, and their speed where no run has measured it.

    All of this loads libraries that stay: look before what the process takes is measured.
    """
    device.warm_up()
    if rank() == 0 and device.known_speed() is None:
        device.measure()
    return rows_of(begin, machine_of(device, budget, 0, num_processes))


def rows_of(begin: Start, machine: Machine) -> Rows:
    """The rows of all steps that are to come."""
    return Rows.ahead(begin.config, machine, begin.prepared, begin.loader, begin.validation, begin.state.step)


def machine_of(
    device: Device, budget: Budget, base_bytes: int, num_processes: int, folder: Path | None = None
) -> Machine:
    """What the plan needs to know of this machine. Args as of `resolve_here`; `folder`: where weights may rest in a file."""
    way, known = traits_of(device.torch_device), device.known_speed()
    # with a budget that is named, what other programs hold does not change the run
    available = budget.available_bytes if budget.binding != FLAG else budget.installed_bytes or budget.available_bytes
    return Machine(
        budget_bytes=budget.limit(),
        available_bytes=available,
        base_bytes=0 if budget.is_on_device else base_bytes,
        rates=tuple((name_of(dtype), device.nominal_rate(dtype)) for dtype in device.rated_dtypes),
        speed_class=device.speed_class,
        measured=() if known is None else known.rates_with(device.threads),
        num_processes=num_processes,
        pads_attention=not way.is_host,
        fuses_attention=way.is_fused,
        widens_whole=device.name != "cpu",
        has_kernels=device.name == "cpu" and kernels() is not None,
        no_kernels=(why_none() or "") if device.name == "cpu" else "",
        measured_disk=None if folder is None else disk_rates(folder),
        host_bytes=max(0, budget.host_bytes - base_bytes) if device.copies_beside else 0,
    )


def _probed(
    begin: Start,
    spec: RunSpec,
    rows: Rows,
    beside: int | None,
    decide: Callable[[Machine, ExecutionPlan | None], RunSpec],
) -> RunSpec:
    """Measure a plan and decide again, until a plan fits that was measured.

    Args:
        beside: what a child may take beside this process; where the plan is above it, a smaller one of the same malloc is measured,
            and what its measurement tells of the formulas corrects the plan. None: the child's memory is another.
    """
    told, chosen, machine = list[str](), spec.plan, spec.machine
    is_measured = False
    for _ in range(MOST_PROBES):
        trial: Plan | None = chosen
        if beside is not None and chosen.peak_bytes > beside:
            trial = None
            with suppress(DoesNotFit):
                trial = decide(replace(machine, budget_bytes=beside), None).plan
        if trial is None or trial.choice.malloc != chosen.choice.malloc:
            size = format_size(beside or 0)
            told.append(say("not probed: a child process may take {size}, too little for any step", size=size))
            break
        result = _probe(begin, trial, rows)
        told.append(_told(result, trial))
        if result.failed and not result.was_killed:
            break  # it tells nothing of memory; the plan stands
        if result.was_killed:
            correction = machine.correction * AFTER_A_KILL
        else:
            is_varied = len(trial.choice.source_sizes) > 1 or len(trial.choice.target_sizes) > 1
            alone = replace(machine, num_processes=1)  # as the child is, which holds no gradients on their way
            parts = predict(spec.work, trial.choice, alone)
            correction = for_later_steps(correction_of(result, parts), parts, is_varied)
            is_measured = True
            # what a smaller one takes less says nothing of this one; what it takes more does
            if trial is not chosen:
                correction = max(correction, machine.correction)
        machine = replace(machine, correction=correction)
        spec = decide(machine, chosen.choice)
        before, chosen = chosen, spec.plan
        if not result.was_killed and (chosen.choice == before.choice or trial is not before):
            break
    uncorrected = (  # of each phase, as they were predicted before any probe
        sum(size for name, size in parts.items() if name != CORRECTION) for parts in chosen.phase_parts.values()
    )
    unprobed = max(uncorrected) if is_measured else None
    return replace(spec, plan=replace(chosen, reasons=(*chosen.reasons, *told), unprobed_peak_bytes=unprobed))


def _probe(begin: Start, chosen: Plan, rows: Rows) -> ProbeResult:
    choice, made = chosen.choice, begin.prepared
    assert rows.lengths is not None and rows.evaluation is not None, "a run has looked at its rows"
    steps = rows.lengths.worst_steps(choice.batch_size_per_gpu, choice.micro_batches_per_pass)
    evaluation = rows.evaluation.worst_steps(choice.eval_batch_size_per_gpu)[-1]
    request = ProbeRequest(
        begin.config, choice, tuple(map(tuple, steps)), max(evaluation, key=lambda rows: sum(map(sum, rows))),
        begin.base, local_rank(),
        ProbeData(made.objective, made.train_dir, made.validation_dir, made.tokenizer_dir, begin.loader.reopens),
    )  # fmt: skip
    if rank() != 0:
        return ProbeResult(failed="left to the first process, whose plan is taken by all")
    return probe(request, Path(begin.config.data.cache_dir))


def _told(result: ProbeResult, chosen: Plan) -> str:
    if result.phases is None:
        return f"probe: {result.failed}, after {result.seconds:.0f} s"
    when = "known from an earlier probe" if result.is_cached else f"in {result.seconds:.0f} s"
    above = (max(result.phases.values()) - result.base_bytes) / MIB
    return f"probe: {above:.0f} MiB above the process itself, {when}; the plan was {format_size(chosen.peak_bytes)}"
