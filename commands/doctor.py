"""`doctor`: what this machine offers and what limits it, what a model takes here, and what to do about it.

torch is imported in a child process, and steps of a model run in another: an import that fails or a step that is killed
becomes a line of the report. Each case of a model is planned as `train` would plan it, with rows as long as they may
be.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from commands.diagnosis.advice import advice_for
from commands.diagnosis.inventory import take_inventory
from devices.environment import prepare_environment
from memory.estimate.precision import COMPUTE_DTYPES, WORDS
from memory.estimate.shapes import Shapes
from memory.estimate.workload import Machine
from memory.probe import ProbeRequest, probe
from memory.weights_in import weights_folder
from settings.declared import Config
from settings.errors import DoesNotFit
from settings.fields import AUTO, counted
from settings.tasks import default_objective
from support.child_process import TIME, ChildDied, call
from support.language import join, say
from support.units import format_size
from training.report.progress import Progress
from training.report.wording import about
from training.saved_model import SHAPE_SETTINGS, find_model
from training.setup.resolving import RunRows, RunSpec, resolve

DEVICE_SECONDS = 60.0
LORA_RANKS = (4, 16, 64)
LENGTH_FACTORS = (0.25, 0.5, 1.0, 2.0)
LENGTHS = (16, 65536)  # The shortest and the longest that are planned.
STEPS_OF_PROBE = 6  # A probe takes about as long as this many steps.
MOST_PROBE_SECONDS = 120.0
Case = dict[str, Any]  # kind, label, outcome (why there are no figures), load_bytes, peak_bytes, seconds


def doctor(config: Config) -> None:
    """Examine this machine and show it: tables, each as soon as it is known, or JSON for programs.

    Raises:
        UserError: the model or the device that was named does not exist.
    """
    name = config.model_preset
    has_model = config.is_on_command_line("model_preset")
    if config.checkpoint.model != AUTO:
        name = config.checkpoint.model
        has_model = True
        shape = find_model(config).shape
        config = config.with_changes(**{field: getattr(shape, field) for field in SHAPE_SETTINGS})
    inventory = take_inventory(weights_folder(config.memory, config.run))
    report: dict[str, Any] = {"machine": inventory, "torch": {}, "devices": [], "problem": "", "model": None}
    machine = None
    try:
        # Products of many threads use many seconds of processor time in one of the clock, so that the clock is the
        # limit.
        facts, machine = call(
            examine_devices,
            config.run.device,
            config if has_model else None,
            setup=prepare_environment,
            is_quiet=True,
            max_cpu=100 * DEVICE_SECONDS,
            patience=0.01,
        )
        report.update(facts)
    except ChildDied as death:
        report["problem"] = str(death)
        if death.reason == TIME:
            report["problem"] = say("no answer within {seconds:.0f} s", seconds=DEVICE_SECONDS)
    progress = Progress(1, not config.plan.json)
    show_machine(report, progress)
    if machine is not None:
        report["model"] = examine_model(name, plan_cases(config, machine), machine.budget_bytes, progress)
    report["advice"] = advice_for(report)
    if config.plan.json:
        print(json.dumps(report, indent=1))
    sentences = report["advice"] or [say("nothing to improve on this machine")]
    progress.table(say("advice"), [("-", sentence) for sentence in sentences])


def examine_devices(device: str, run: Config | None) -> tuple[dict[str, Any], Machine | None]:
    """`torch` and `devices` of the report, and the machine that a run would plan for; imports torch.

    Args:
        device: the setting, by which devices are measured. run: settings of the run; None: there is no model.

    Raises:
        UserError: the device that was named for the model is not here.
    """
    from devices.inventory import device_report
    from training.setup.plan import machine_for

    return device_report(device), None if run is None else machine_for(
        device, run.memory.memory_budget, weights_folder(run.memory, run.run)
    )


def plan_cases(config: Config, machine: Machine) -> list[tuple[Case, RunSpec | None]]:
    """The run's own step, and single rows of other lengths and with adapters of several ranks, each with its plan.

    Where a case does not fit, it has no plan, and its `outcome` says which budget would do.
    """
    single_row = {"effective_batch_size": 1, "batch_size_per_gpu": 1, "gradient_accumulation_steps": AUTO}
    optimizer = config.train.optimizer if config.is_set("optimizer") else "adamw"  # A run takes it for adapters.
    shortest, longest = LENGTHS
    lengths = {min(max(int(config.data.max_seq_len * factor), shortest), longest) for factor in LENGTH_FACTORS}
    variations: list[tuple[str, int | str, dict[str, Any]]] = [
        ("step", "as planned", {}),
        *(("sequence length", length, {**single_row, "max_seq_len": length}) for length in sorted(lengths)),
        *(("LoRA rank", rank, {**single_row, "lora_rank": rank, "optimizer": optimizer}) for rank in LORA_RANKS),
    ]
    objective = config.data.objective
    if objective == AUTO:
        objective = default_objective(config.train.is_finetune)
    cases: list[tuple[Case, RunSpec | None]] = []
    for kind, label, changes in variations:
        # Samples at the end of a run would take time here, and no memory.
        changed = config.with_changes(sample_rows=0, objective=objective, **changes)
        case: Case = {"kind": kind, "label": str(label), "load_bytes": None, "peak_bytes": None, "seconds": None}
        spec = None
        try:
            rows = RunRows.longest_allowed(changed.data, objective, changed.train.eval_rows)
            spec = resolve(changed, machine, rows)
            plan = spec.plan
            case |= {"load_bytes": plan.phases["load"], "peak_bytes": plan.peak_bytes, "seconds": plan.seconds}
            case["outcome"] = ""
        except DoesNotFit as error:
            case["outcome"] = say("does not fit: {need}", need=error.problems[-1])
        cases.append((case, spec))
    return cases


def examine_model(
    name: str, cases: list[tuple[Case, RunSpec | None]], budget_bytes: int, progress: Progress
) -> dict[str, Any]:
    """What steps take as planned, and what the first that can be measured in reasonable time takes as measured."""
    planned = [case for case, _ in cases]
    title = say("{model}, as planned for {budget}", model=name, budget=format_size(budget_bytes))
    progress.table(title, case_rows(planned))
    sys.stdout.flush()
    report: dict[str, Any] = {"name": name, "budget_bytes": budget_bytes, "planned": planned, "measured": None}
    for case, spec in cases:
        if spec is not None and STEPS_OF_PROBE * case["seconds"] <= MOST_PROBE_SECONDS:
            seconds = STEPS_OF_PROBE * case["seconds"]
            text = say(
                "measuring {case}: {time} plus process start", case=name_of(case), time=about(seconds, seconds, seconds)
            )
            print(text, file=sys.stderr, flush=True)
            report["measured"] = {**case, **measure(spec), "predicted_bytes": spec.plan.peak_bytes}
            progress.table(say("{case}, measured", case=name_of(case)), case_rows([report["measured"]]))
            break
    return report


def measure(spec: RunSpec) -> dict[str, Any]:
    """The figures of a case, measured on steps in a child process."""
    choice = spec.plan.choice
    num_rows = choice.batch_size_per_gpu * choice.gradient_accumulation_steps
    shapes = Shapes.longest(num_rows, spec.rows.source_tokens, spec.rows.target_tokens)
    steps = tuple(map(tuple, shapes.worst_steps(choice.batch_size_per_gpu, choice.micro_batches_per_pass)))
    evaluation = shapes.worst_steps(choice.eval_batch_size_per_gpu)[0][0]
    result = probe(ProbeRequest(spec.config, choice, steps, evaluation), None, MOST_PROBE_SECONDS)
    phases = result.phases or {}
    return {
        "outcome": result.failed,
        "load_bytes": phases.get("load"),
        "peak_bytes": max(phases.values(), default=None),
        "seconds": result.step_seconds or None,
    }


def show_machine(report: dict[str, Any], progress: Progress) -> None:
    """The tables of what is known before a model is examined."""
    progress.table(say("this machine"), list(machine_rows(report)))
    available = [device for device in report["devices"] if not device["missing"]]
    if available:
        progress.table(say("devices, measured"), list(device_rows(available)))
    for device in report["devices"]:
        if device["missing"]:
            progress.note(say("{device} is missing: {why}", device=device["name"], why=device["missing"]))
    sys.stdout.flush()


def machine_rows(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    machine = report["machine"]
    system = machine["system"]
    memory = machine["memory"]
    disk = machine["disk"]
    torch = report["torch"]
    yield say("system"), f"{system['platform']}, Python {system['python']}"
    cores = [system["processor"], counted(system["cores"], "core")]
    if system["core_quota"] is not None:
        cores.append(say("a quota of {cores}", cores=f"{system['core_quota']:g}"))
    if system["load"] is not None:
        cores.append(say("load {load}", load=f"{system['load']:g}"))
    yield say("processor"), join(", ", cores)
    yield "", say("class: {name} ({instructions})", name=say(system["class"]), instructions=say(system["instructions"]))
    yield say("compiled kernels"), system["kernels"]
    sizes = {name: format_size(size) for name, size in memory.items() if name.endswith("_bytes")}
    yield "RAM", say("{total}, {available} available", total=sizes["total_bytes"], available=sizes["available_bytes"])
    swap = say("none")
    if memory["swap_total_bytes"]:
        swap = say("{used} of {total} in use", used=sizes["swap_used_bytes"], total=sizes["swap_total_bytes"])
    yield say("swap"), swap
    for limit in memory["limits"]:
        words = join(": ", [say(limit["what"]), format_size(limit["bytes"])])
        yield say("limit"), say("{limit} (binds)", limit=words) if limit["what"] == memory["binding"] else words
    free = say("{budget}, {margin} left free", budget=sizes["budget_bytes"], margin=sizes["margin_bytes"])
    yield say("available to a run"), free
    for other in machine["others"]:
        size = format_size(other["bytes"])
        yield (
            say("used by other programs"),
            say("{size} by {name} ({number})", size=size, name=other["name"], number=other["pid"]),
        )
    speeds = [say("{folder}: {size} free", folder=disk["folder"], size=format_size(disk["free_bytes"]))]
    if disk["write_rate"] is not None:
        speeds.append(say("writes {rate}B/s", rate=with_prefix(disk["write_rate"])))
    if disk["read_rate"] is not None:
        speeds.append(say("reads {rate}B/s", rate=with_prefix(disk["read_rate"])))
    yield say("disk"), join(", ", speeds)
    yield say("allocator"), machine["malloc"]["library"]
    if torch:
        yield "torch", join(", ", [torch["version"], torch["cpu_capability"], counted(torch["threads"], "thread")])
    packages = (f"{name} {version}" for name, version in machine["packages"].items() if name != "torch")
    yield say("packages"), ", ".join(packages)
    for name, value in machine["environment"].items():
        yield say("variable"), f"{name}={value}"


def device_rows(devices: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    yield say("device"), *(f"{WORDS[dtype]} FLOP/s" for dtype in COMPUTE_DTYPES), say("copy B/s"), say("computes in")
    for device in devices:
        name = device["about"]
        if device["total_bytes"]:
            free = format_size(device["free_bytes"])
            name = say(
                "{device}, {free} of {total} free", device=name, free=free, total=format_size(device["total_bytes"])
            )
        yield (
            name,
            *(with_prefix(device["rates"][dtype]) for dtype in COMPUTE_DTYPES),
            with_prefix(device["copy_rate"]),
            WORDS[device["compute"]],
        )


def name_of(case: Case) -> str:
    return join(" ", [say(case["kind"]), say(case["label"])])


def case_rows(cases: list[Case]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [(say("what"), say("model load"), say("peak"), say("s/step"))]
    for case in cases:
        figures: tuple[str, ...] = (case["outcome"],)
        if not case["outcome"]:
            figures = (format_size(case["load_bytes"]), format_size(case["peak_bytes"]), f"{case['seconds']:.2f}")
        rows.append((name_of(case), *figures))
    return rows


def with_prefix(rate: float) -> str:
    """A rate with the prefix that people read: `95 G`."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if rate >= factor:
            return f"{rate / factor:.3g} {prefix}"
    return f"{rate:.3g} "
