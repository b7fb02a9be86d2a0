"""Stage 5: how each step of a run is done, in how much memory; where the plan is near the budget, as `memory.probe`
measures it.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from devices import pick
from devices.base import Device, name_of, traits_of
from devices.kernels.calls import kernels, why_none
from devices.machine_file import disk_rates
from devices.pointwise import why_no_rounding_kernel
from engine.compiled import compiler_failure
from memory.budget import FLAG, Budget, measure_budget
from memory.estimate.peaks import CORRECTION, predict
from memory.estimate.workload import BASE_BYTES, ExecutionPlan, Machine
from memory.monitor import Monitor
from memory.plan import Plan
from memory.probe import ProbeData, ProbeRequest, ProbeResult, correction_of, for_later_steps, probe
from memory.step_settings import StepSettings
from memory.step_work import effective_batch
from memory.system_limits import free_host_bytes
from memory.weights_in import weights_folder
from settings.consistency import writes_answers
from settings.errors import DoesNotFit, UserError
from settings.fields import AUTO
from support.language import say
from support.units import MIB, format_size
from training.evaluation.scores import AnswerScores, metric_names
from training.processes.launch import local_rank, rank
from training.setup.data import PreparedData
from training.setup.machine import installed_bytes
from training.setup.resolved import Beginning, ResolvedRun
from training.setup.resolving import RunRows, RunSpec, resolve
from training.setup.schedules import Steps

PROBE_FROM = 0.85  # Share of the budget from which a plan is probed with probe=auto.
MOST_PROBES = 3  # Each may lead to another plan, which is then probed in turn.
# RAM of a process on a GPU after its first step over that before (H200, torch 2.11: 1.2 and 0.65 GiB).
FIRST_STEP = 2.0
AFTER_A_KILL = 1.15  # Factor on temporary memory, where the probe was killed and so measured nothing.


def choose_plan(run: Beginning, data: PreparedData, budget: Budget, monitor: Monitor) -> tuple[RunSpec, int]:
    """Choose how each step is done within the budget: near it, a child measures the plan before it is taken.

    Returns:
        the plan, the same on all processes; and what this process holds before the weights, in bytes.
    Raises:
        DoesNotFit: no plan fits the budget.
    """
    group = run.group
    rows = look_ahead(run, data, budget)
    metrics = run.config.metrics
    if writes_answers(metrics):
        # Its libraries count to what the program takes.
        AnswerScores(metric_names(metrics.metrics, run.config.answer.num_answers))
    base_bytes = monitor.sample().anon_bytes
    ram_bytes = int(group.all_reduce_max(loaded_bytes(run.device, base_bytes))[0])
    if budget.is_on_device and ram_bytes > budget.host_bytes:
        raise DoesNotFit(
            "{budget} of RAM ({why}), is less than the {size} of RAM that a run on {device} needs, "
            "including the device's libraries",
            budget=format_size(budget.host_bytes),
            why=say(budget.binding),
            size=format_size(ram_bytes),
            device=run.device.describe(),
        )
    with monitor.phase("probe"):
        spec = plan_here(run, data, rows, budget, base_bytes)
    # The first process alone has probed.
    chosen, correction = group.broadcast((spec.plan, spec.machine.correction))
    spec = replace(spec, plan=chosen, machine=replace(spec.machine, correction=correction))
    if spec.run_steps.effective_batch_size < group.size:
        raise UserError(
            "--effective_batch_size = {effective_batch_size}, is less than one row for each of {size} processes; "
            "raise it",
            effective_batch_size=spec.run_steps.effective_batch_size,
            size=group.size,
        )
    return spec, base_bytes


def plan_again(run: ResolvedRun, settings: StepSettings, budget: Budget) -> Plan:
    """A plan for the same run with other settings of its steps, or another budget; it need not go on as the run has
    gone so far.
    """
    config = run.config
    folder = weights_folder(config.memory, config.run)
    machine = machine_of(run.device, budget, run.base_bytes, run.group.size, folder)
    machine = replace(machine, correction=run.spec.machine.correction)
    running = run.spec.plan.choice
    return resolve(config, machine, run.spec.rows, done=run.state.step, running=running, settings=settings).plan


def look_ahead(run: Beginning, data: PreparedData, budget: Budget) -> RunRows:
    """The rows that come; and the first products, and their speed where no run has measured it.

    All of this loads libraries that stay: look before what the process takes is measured.
    """
    run.device.warm_up()
    if rank() == 0 and run.device.known_speed() is None:
        run.device.measure()
    config = run.config
    train = config.train
    batch = effective_batch(train, machine_of(run.device, budget, 0, run.group.size))
    steps = Steps.of(train, config.model, config.lora, data.task, batch, data.loader.num_rows)
    done = run.state.step
    return RunRows.of_prepared(
        data.prepared,
        data.loader,
        data.validation,
        range(done, max(done + 1, steps.max_steps)),
        effective_batch_size=batch,
        eval_rows=train.eval_rows,
        num_processes=run.group.size,
    )


def plan_here(run: Beginning, data: PreparedData, rows: RunRows, budget: Budget, base_bytes: int) -> RunSpec:
    """Decide all that is auto, for this machine; a run that goes on keeps its choice where it still fits.

    Args:
        base_bytes: what this process holds before the weights.
    """
    config = run.config
    machine = machine_of(run.device, budget, base_bytes, run.group.size, weights_folder(config.memory, config.run))
    decide = partial(
        resolve,
        config,
        rows=rows,
        done=run.state.step,
        earlier=ExecutionPlan(**run.state.choice) if run.state.choice else None,
        changed=StepSettings.of(config).changed_since(run.state.asked or {}),
    )
    spec = decide(machine)
    if spec.plan.choice.compiled and (failure := compiler_failure(run.device.torch_device)):
        machine = replace(machine, no_compiler=say("torch's compiler fails: {failure}", failure=failure))
        spec = decide(machine)
    # Steps of a model that is larger than the memory take minutes, and nearly all of its memory are weights, which are
    # counted.
    is_near = spec.plan.peak_bytes > PROBE_FROM * machine.budget_bytes and not spec.plan.choice.offloaded_blocks
    probes = is_near if config.memory.probe == AUTO else config.memory.probe
    return _probed(run, data, spec, budget, base_bytes) if probes else spec


def machine_of(
    device: Device, budget: Budget, base_bytes: int, num_processes: int, folder: Path | None = None
) -> Machine:
    """What the plan needs to know of this machine.

    Args:
        base_bytes: of the process before the model is built. folder: for a file of offloaded weights.
    """
    traits = traits_of(device.torch_device)
    speed = device.known_speed()
    no_kernels = (why_none() or "") if device.name == "cpu" else why_no_rounding_kernel(device.torch_device)
    installed = installed_bytes(budget)
    # With a budget that is named, what other programs take does not change the run.
    available = installed if budget.binding == FLAG else budget.available_bytes
    return Machine(
        budget_bytes=budget.limit(),
        available_bytes=available,
        installed_bytes=installed,
        base_bytes=0 if budget.is_on_device else base_bytes,
        rates=tuple((name_of(dtype), device.nominal_rate(dtype)) for dtype in device.rated_dtypes),
        speed_class=device.speed_class,
        measured=speed.rates_with(device.threads) if speed else (),
        num_processes=num_processes,
        libraries_bytes=device.library_bytes,
        pads_attention=not traits.is_host,
        fuses_attention=traits.has_fused_attention,
        widens_whole=device.name != "cpu",
        has_kernels=device.name == "cpu" and kernels() is not None,
        no_kernels=no_kernels,
        no_compiler=device.why_not_compiling(),
        measured_disk=None if folder is None else disk_rates(folder),
        host_bytes=max(0, budget.host_bytes - loaded_bytes(device, base_bytes)) if device.overlaps_copies else 0,
        device="" if device.name == "cpu" else device.describe(),
        has_own_memory=device.is_separate_memory,
    )


def loaded_bytes(device: Device, base_bytes: int) -> int:
    """RAM of a process whose steps have loaded all libraries of a device, from what it takes before its first step."""
    return int(FIRST_STEP * base_bytes) if device.is_separate_memory else base_bytes


def machine_for(device_name: str, memory_budget: int | str, folder: Path) -> Machine:
    """The machine that a run plans for, as far as it is known before it starts; imports torch.

    Args:
        device_name, memory_budget: the settings. folder: for a file of offloaded weights.
    Raises:
        UserError: the device is not here.
    """
    device = pick(device_name)
    return machine_of(device, measure_budget(memory_budget, device), BASE_BYTES, 1, folder)


def _probed(run: Beginning, data: PreparedData, spec: RunSpec, budget: Budget, base_bytes: int) -> RunSpec:
    """Measure a plan and decide again, until a plan fits that was measured.

    A child counts to the same budget and the same limits of the system. Where the plan is above what they leave beside
    this process, a smaller one of the same malloc is measured, and what its measurement says of the formulas corrects
    the plan.
    """
    ram_bytes = budget.host_bytes - base_bytes
    if budget.is_on_device and loaded_bytes(run.device, base_bytes) > ram_bytes:
        text = "not probed: {size} of RAM is not enough for a child process that uses the device"
        return _with_reasons(spec, say(text, size=format_size(ram_bytes)))
    decide = partial(resolve, run.config, rows=spec.rows, done=run.state.step)
    child_bytes = 0 if run.device.is_separate_memory else max(1, min(ram_bytes, free_host_bytes()))
    notes = list[str]()
    measured: RunSpec | None = None
    for _ in range(MOST_PROBES):
        planned = spec.plan
        trial = planned
        if 0 < child_bytes < planned.peak_bytes:
            with suppress(UserError):  # It does not fit, or is not compiled as is asked for.
                trial = decide(replace(spec.machine, budget_bytes=child_bytes)).plan
        if trial.peak_bytes > child_bytes > 0 or trial.choice.malloc != planned.choice.malloc:
            size = format_size(child_bytes)
            notes.append(say("not probed: the {size} left for a child process is not enough for any step", size=size))
            break
        result = _probe(run, data, spec.rows, trial, budget.limit(), child_bytes)
        notes.append(_in_words(result, trial))
        if result.failed and not result.was_killed:
            break  # It says nothing of memory; the plan stands.
        correction = spec.machine.correction * AFTER_A_KILL
        if not result.was_killed:
            correction = _corrected(spec, trial, result)
        machine = replace(spec.machine, correction=correction)
        spec = decide(machine, earlier=planned.choice)
        if result.was_killed:
            continue
        measured = spec
        if spec.plan.choice == planned.choice or trial is not planned:
            break
    spec = _with_reasons(spec, *notes)
    if measured is None:
        return spec
    # The phases as they were predicted before any probe:
    phases = spec.plan.phase_parts.values()
    unprobed = max(sum(parts.values()) - parts.get(CORRECTION, 0) for parts in phases)
    return replace(spec, plan=replace(spec.plan, unprobed_peak_bytes=unprobed))


def _with_reasons(spec: RunSpec, *notes: str) -> RunSpec:
    return replace(spec, plan=replace(spec.plan, reasons=(*spec.plan.reasons, *notes)))


def _corrected(spec: RunSpec, trial: Plan, result: ProbeResult) -> float:
    """The factor on temporary memory that a measurement of a plan leads to."""
    # The child is alone, and holds no gradients on their way.
    parts = predict(spec.work, trial.choice, replace(spec.machine, num_processes=1))
    is_varied = len(trial.choice.source_sizes) > 1 or len(trial.choice.target_sizes) > 1
    correction = for_later_steps(correction_of(result, parts), parts, is_varied)
    if trial is spec.plan:
        return correction
    # A smaller plan that takes less says nothing of this one; one that takes more does.
    return max(correction, spec.machine.correction)


def _probe(
    run: Beginning, data: PreparedData, rows: RunRows, trial: Plan, limit_bytes: int, child_bytes: int
) -> ProbeResult:
    if rank() != 0:
        return ProbeResult(failed=say("left to the first process, whose plan is taken by all"))
    choice = trial.choice
    prepared = data.prepared
    assert rows.lengths is not None and rows.evaluation is not None, "a run has looked at its rows"
    steps = rows.lengths.worst_steps(choice.batch_size_per_gpu, choice.micro_batches_per_pass)
    evaluated = rows.evaluation.worst_steps(choice.eval_batch_size_per_gpu)[-1]
    request = ProbeRequest(
        run.config,
        choice,
        tuple(map(tuple, steps)),
        max(evaluated, key=lambda batch: sum(map(sum, batch))),
        run.base,
        local_rank(),
        ProbeData(
            prepared.objective,
            prepared.train_dir,
            prepared.validation_dir,
            prepared.tokenizer_dir,
            data.loader.reopens,
            None if data.answers is None else data.answers.folder,
        ),
        run.device.computes_on,
        limit_bytes,
        child_bytes,
    )
    return probe(request, Path(run.config.data.cache_dir))


def _in_words(result: ProbeResult, trial: Plan) -> str:
    seconds = f"{result.seconds:.0f}"
    if result.phases is None:
        return say("probe: {failed}, after {seconds} s", failed=result.failed, seconds=seconds)
    when = say("known from an earlier probe") if result.is_cached else say("in {seconds} s", seconds=seconds)
    above = (max(result.phases.values()) - result.base_bytes) / MIB
    return say(
        "probe: {above:.0f} MiB above the process itself, {when}; the plan was {size}",
        above=above,
        when=when,
        size=format_size(trial.peak_bytes),
    )
