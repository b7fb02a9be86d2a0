"""Stage 5: how each step of a run is done, in how much memory; where the plan is near the budget, as `memory.probe` measures it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from devices import pick
from devices.base import Device, name_of, traits_of
from devices.kernels.calls import kernels, why_none
from devices.machine_file import disk_rates
from devices.pointwise import why_not_compiled
from language import say
from memory.budget import FLAG, Budget, measure_budget
from memory.estimate.peaks import CORRECTION, predict
from memory.estimate.workload import BASE_BYTES, ExecutionPlan, Machine
from memory.observe.system_limits import free_host_bytes
from memory.plan import Plan
from memory.probe import ProbeData, ProbeRequest, ProbeResult, correction_of, for_later_steps, probe
from memory.resumed_choice import newly_asked
from memory.weights_in import weights_folder
from settings.consistency import writes_answers
from settings.declared import Config
from settings.errors import DoesNotFit, UserError
from settings.fields import AUTO
from training.evaluation.scores import AnswerScores, metric_names
from training.processes.launch import local_rank, rank
from training.setup.resolved import ResolvedRun
from training.setup.resolving import Rows, RunSpec, resolve
from units import MIB, format_size

PROBE_FROM = 0.85  # share of the budget from which a plan is probed with probe=auto
MOST_PROBES = 3  # each may lead to another plan, which is then probed in turn
FIRST_STEP = 2.0  # RAM of a process on a GPU after its first step over that before (H200, torch 2.11: 1.2 and 0.65 GiB)
AFTER_A_KILL = 1.15  # factor on temporary memory, where the probe was killed and so told nothing but that


def choose_plan(run: ResolvedRun) -> None:
    """Choose how each step is done within the budget: near it, a child measures the plan before it is taken.

    Raises:
        DoesNotFit: no way fits the budget.
    """
    group = run.group
    rows = look_ahead(run)
    if writes_answers(run.config):
        AnswerScores(metric_names(run.config))  # its libraries count to what the program takes
    run.base_bytes = run.monitor.sample().anon_bytes
    beside = int(group.all_reduce_max(loaded_bytes(run.device, run.base_bytes))[0])
    if run.budget.is_on_device and beside > run.budget.host_bytes:
        message = "{budget} of RAM ({why}), is less than the {size} that a run on {device} takes there, with the libraries of the device"
        raise DoesNotFit(
            say(
                message, budget=format_size(run.budget.host_bytes), why=say(run.budget.binding), size=format_size(beside),
                device=run.device.describe(),
            )
        )  # fmt: skip
    with run.monitor.phase("probe"):
        spec = plan_here(run, rows)
    chosen, correction = group.broadcast((spec.plan, spec.machine.correction))  # the first process alone has probed
    run.spec = replace(spec.by(chosen), machine=replace(spec.machine, correction=correction))
    run.config = run.spec.settings
    if run.spec.counted.effective_batch_size < group.size:
        raise UserError(
            "--effective_batch_size = {effective_batch_size}, is less than one row for each of {size} processes; "
            "raise it",
            effective_batch_size=run.spec.counted.effective_batch_size,
            size=group.size,
        )


def plan_again(run: ResolvedRun, config: Config, budget: Budget) -> Plan:
    """A plan for the same run with other settings or another budget; it need not go on as the run has gone so far."""
    choice, machine = run.spec.plan.choice, _machine_of(run, budget, run.spec.machine.correction)
    return resolve(config, machine, run.spec.rows, done=run.state.step, running=choice).plan


def look_ahead(run: ResolvedRun) -> Rows:
    """The rows that come; and the first products, and their speed where no run has measured it.

    All of this loads libraries that stay: look before what the process takes is measured.
    """
    run.device.warm_up()
    if rank() == 0 and run.device.known_speed() is None:
        run.device.measure()
    machine = machine_of(run.device, run.budget, 0, run.group.size)
    return Rows.ahead(run.config, machine, run.prepared, run.loader, run.validation, run.state.step)


def plan_here(run: ResolvedRun, rows: Rows) -> RunSpec:
    """Decide all that is auto, for this machine; a run that goes on keeps its choice where it still fits."""
    config, machine = run.config, _machine_of(run, run.budget)
    earlier = ExecutionPlan(**run.state.choice) if run.state.choice else None
    anew = newly_asked(config, run.state.asked or {})
    spec = resolve(config, machine, rows, done=run.state.step, earlier=earlier, anew=anew)
    asked = config.memory.probe
    # steps of a model that is larger than the memory take minutes, and nearly all of its memory are weights, which are counted
    is_near = spec.plan.peak_bytes > PROBE_FROM * machine.budget_bytes and not spec.plan.choice.offloaded_blocks
    if asked is False or (asked == AUTO and not is_near):
        return spec
    return _probed(run, spec)


def _machine_of(run: ResolvedRun, budget: Budget, correction: float = 1.0) -> Machine:
    machine = machine_of(run.device, budget, run.base_bytes, run.group.size, weights_folder(run.config))
    return replace(machine, correction=correction)


def machine_of(
    device: Device, budget: Budget, base_bytes: int, num_processes: int, folder: Path | None = None
) -> Machine:
    """What the plan needs to know of this machine. Args as of `resolve_here`; `folder`: for a file of offloaded weights."""
    way, known = traits_of(device.torch_device), device.known_speed()
    no_kernels = (why_none() or "") if device.name == "cpu" else why_not_compiled(device.torch_device)
    installed = budget.available_bytes if budget.installed_bytes is None else budget.installed_bytes
    # with a budget that is named, what other programs hold does not change the run
    available = budget.available_bytes if budget.binding != FLAG else installed
    return Machine(
        budget_bytes=budget.limit(),
        available_bytes=available,
        installed_bytes=installed,
        base_bytes=0 if budget.is_on_device else base_bytes,
        rates=tuple((name_of(dtype), device.nominal_rate(dtype)) for dtype in device.rated_dtypes),
        speed_class=device.speed_class,
        measured=() if known is None else known.rates_with(device.threads),
        num_processes=num_processes,
        libraries_bytes=device.library_bytes,
        pads_attention=not way.is_host,
        fuses_attention=way.is_fused,
        compiles_dropout=way.has_compiler and not no_kernels,
        processors=way.processors,
        widens_whole=device.name != "cpu",
        has_kernels=device.name == "cpu" and kernels() is not None,
        no_kernels=no_kernels,
        measured_disk=None if folder is None else disk_rates(folder),
        host_bytes=max(0, budget.host_bytes - loaded_bytes(device, base_bytes)) if device.copies_beside else 0,
        device="" if device.name == "cpu" else device.describe(),
        has_own_memory=device.is_separate_memory,
    )


def loaded_bytes(device: Device, base_bytes: int) -> int:
    """RAM of a process whose steps have loaded all libraries of a device, from what it takes before its first step."""
    return int(FIRST_STEP * base_bytes) if device.is_separate_memory else base_bytes


def machine_for(config: Config) -> Machine:
    """The machine that a run of these settings plans for, as far as it is known before it starts; imports torch.

    Raises:
        UserError: the device is not here.
    """
    device = pick(config.run.device)
    budget = measure_budget(config.memory.memory_budget, device)
    return machine_of(device, budget, BASE_BYTES, 1, weights_folder(config))


def _probed(run: ResolvedRun, spec: RunSpec) -> RunSpec:
    """Measure a plan and decide again, until a plan fits that was measured.

    A child counts to the same budget and the same limits of the system. Where the plan is above what they leave beside this
    process, a smaller one of the same malloc is measured, and what its measurement tells of the formulas corrects the plan.
    """
    beside = None if run.device.is_separate_memory else min(run.budget.host_bytes - run.base_bytes, free_host_bytes())
    told, chosen, machine = list[str](), spec.plan, spec.machine
    if run.budget.is_on_device and run.base_bytes + loaded_bytes(run.device, run.base_bytes) > run.budget.host_bytes:
        size = format_size(run.budget.host_bytes - run.base_bytes)
        reason = say("not probed: {size} of RAM is too little for a child process that uses the device", size=size)
        return replace(spec, plan=replace(chosen, reasons=(*chosen.reasons, reason)))
    decide = partial(resolve, run.config, rows=spec.rows, done=run.state.step)
    is_measured = False
    for _ in range(MOST_PROBES):
        trial: Plan | None = chosen
        if beside is not None and chosen.peak_bytes > beside:
            trial = None
            with suppress(DoesNotFit):
                trial = decide(replace(machine, budget_bytes=beside)).plan
        if trial is None or trial.choice.malloc != chosen.choice.malloc:
            size = format_size(beside or 0)
            told.append(say("not probed: {size} left for a child process is too little for any step", size=size))
            break
        result = _probe(run, spec, trial, beside or 0)
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
        spec = decide(machine, earlier=chosen.choice)
        before, chosen = chosen, spec.plan
        if not result.was_killed and (chosen.choice == before.choice or trial is not before):
            break
    uncorrected = (  # of each phase, as they were predicted before any probe
        sum(size for name, size in parts.items() if name != CORRECTION) for parts in chosen.phase_parts.values()
    )
    unprobed = max(uncorrected) if is_measured else None
    return replace(spec, plan=replace(chosen, reasons=(*chosen.reasons, *told), unprobed_peak_bytes=unprobed))


def _probe(run: ResolvedRun, spec: RunSpec, chosen: Plan, host_bytes: int) -> ProbeResult:
    choice, made, rows = chosen.choice, run.prepared, spec.rows
    assert rows.lengths is not None and rows.evaluation is not None, "a run has looked at its rows"
    steps = rows.lengths.worst_steps(choice.batch_size_per_gpu, choice.micro_batches_per_pass)
    evaluation = rows.evaluation.worst_steps(choice.eval_batch_size_per_gpu)[-1]
    request = ProbeRequest(
        run.config.changed(device=run.device.name), choice, tuple(map(tuple, steps)), max(evaluation, key=lambda rows: sum(map(sum, rows))),
        run.base, local_rank(),
        ProbeData(made.objective, made.train_dir, made.validation_dir, made.tokenizer_dir, run.loader.reopens, run.listed_in),
        run.device.computes_on, run.budget.limit(), host_bytes,
    )  # fmt: skip
    if rank() != 0:
        return ProbeResult(failed=say("left to the first process, whose plan is taken by all"))
    return probe(request, Path(run.config.data.cache_dir))


def _told(result: ProbeResult, chosen: Plan) -> str:
    if result.phases is None:
        return say("probe: {failed}, after {seconds} s", failed=result.failed, seconds=f"{result.seconds:.0f}")
    when = (
        say("known from an earlier probe")
        if result.is_cached
        else say("in {seconds} s", seconds=f"{result.seconds:.0f}")
    )
    above = (max(result.phases.values()) - result.base_bytes) / MIB
    return say(
        "probe: {above:.0f} MiB above the process itself, {when}; the plan was {size}",
        above=above,
        when=when,
        size=format_size(chosen.peak_bytes),
    )
