"""`doctor`: what this machine offers and what limits it, what a model takes here, and what to do about it.

torch is imported in a child process, and steps of a model run in another: an import that fails or a step that is killed
becomes a line of the report.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from childproc import TIME, ChildDied, call
from commands.diagnosis.advice import advice_for
from commands.diagnosis.inventory import take_inventory
from commands.diagnosis.model_memory import Case, choose_case, measure_case, plan_cases, probe_seconds
from devices.environment import prepare_environment
from language import join, say
from memory.estimate.precision import COMPUTE_DTYPES, WORDS
from memory.estimate.workload import Machine
from memory.weights_in import weights_folder
from settings.declared import Config, T5ModelConfig
from settings.fields import AUTO, counted
from training.report.progress import Progress
from training.report.wording import about
from units import format_size

DEVICE_SECONDS = 60.0
# Products of many threads use many seconds of processor time in one second of the clock, so that the clock is the limit.
DEVICE_LIMITS = {"max_cpu": 100 * DEVICE_SECONDS, "patience": 0.01}


def doctor(config: Config) -> None:
    """Examine this machine and show it: tables, each as soon as it is known, or JSON for programs.

    Raises:
        UserError: the model or the device that was named does not exist.
    """
    has_folder = config.checkpoint.model != AUTO
    has_model = has_folder or config.typed("model_preset")
    if has_folder:
        shape = call(read_shape, config)
        config = replace(config, model=replace(shape, dropout_rate=config.model.dropout_rate))
    inventory = take_inventory(weights_folder(config))
    report: dict[str, Any] = {"machine": inventory, "torch": {}, "devices": [], "problem": "", "model": None}
    machine = None
    try:
        facts, machine = call(
            examine_devices, config, has_model, setup=prepare_environment, is_quiet=True, **DEVICE_LIMITS
        )
        report.update(facts)
    except ChildDied as death:
        report["problem"] = str(death)
        if death.reason == TIME:
            report["problem"] = say("no answer within {seconds:.0f} s", seconds=DEVICE_SECONDS)
    progress = None if config.plan.json else Progress(1)
    if progress is not None:
        show_machine(report, progress)
    if machine is not None:
        name = config.checkpoint.model if has_folder else config.model_preset
        report["model"] = examine_model(config, machine, name, progress)
    report["advice"] = advice_for(report)
    if progress is None:
        print(json.dumps(report, indent=1))
    else:
        advice = report["advice"] or [say("nothing to improve on this machine")]
        progress.table(say("advice"), [("-", sentence) for sentence in advice])


def read_shape(config: Config) -> T5ModelConfig:
    """The shape of the model folder that the settings name; imports torch.

    Raises:
        UserError: there is no such folder, or it holds no model.
    """
    from model.formats.shape_file import read_config
    from training.saved_model import find_model

    return read_config(find_model(config).base)


def examine_devices(config: Config, has_model: bool) -> tuple[dict[str, Any], Machine | None]:
    """`torch` and `devices` of the report, and with a model the machine that its run would plan for; imports torch.

    Raises:
        UserError: the device that was named for the model is not here.
    """
    from devices.inventory import device_report
    from memory.weights_in import weights_folder
    from training.setup.plan import machine_for

    report = device_report(config.run.device)
    if not has_model:
        return report, None
    return report, machine_for(config.run.device, config.memory.memory_budget, weights_folder(config))


def examine_model(config: Config, machine: Machine, name: str, progress: Progress | None) -> dict[str, Any]:
    """What steps of a model take as planned, and what one of them takes as measured; shown as soon as it is known."""
    cases = plan_cases(config, machine)
    if progress is not None:
        title = say("{model}, as planned for {budget}", model=name, budget=format_size(machine.budget_bytes))
        progress.table(title, list(planned_rows(cases)))
        sys.stdout.flush()
    case = choose_case(cases)
    measured = None
    if case is not None and case.spec is not None:
        seconds = probe_seconds(case.spec)
        announcement = say(
            "measuring {case}: {time} plus process start", case=case.name, time=about(seconds, seconds, seconds)
        )
        print(announcement, file=sys.stderr, flush=True)
        measured = {**measure_case(case), "predicted_bytes": case.spec.plan.peak_bytes}
        if progress is not None and not measured["outcome"]:
            progress.table(say("{case}, measured", case=case.name), list(measured_rows(case, measured)))
    planned = [case.as_dict() for case in cases]
    return {"name": name, "budget_bytes": machine.budget_bytes, "planned": planned, "measured": measured}


# --- tables


def show_machine(report: dict[str, Any], progress: Progress) -> None:
    """The tables of what is known before a model is examined."""
    progress.table(say("this machine"), list(machine_rows(report)))
    if report["devices"]:
        progress.table(say("devices, measured"), list(device_rows(report["devices"])))
    for device in report["devices"]:
        if device["missing"]:
            progress.note(say("{device} is missing: {why}", device=device["name"], why=device["missing"]))
    sys.stdout.flush()


def machine_rows(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    machine = report["machine"]
    system = machine["system"]
    yield say("system"), f"{system['platform']}, Python {system['python']}"
    cores = [system["processor"], counted(system["cores"], "core")]
    if system["core_quota"] is not None:
        cores.append(say("a quota of {cores}", cores=f"{system['core_quota']:g}"))
    if system["load"] is not None:
        cores.append(say("load {load}", load=f"{system['load']:g}"))
    yield say("processor"), join(", ", cores)
    yield "", say("class: {name} ({instructions})", name=say(system["class"]), instructions=say(system["instructions"]))
    yield say("compiled kernels"), system["kernels"]
    yield from memory_rows(machine["memory"])
    for other in machine["others"]:
        size = format_size(other["bytes"])
        yield (
            say("used by other programs"),
            say("{size} by {name} ({number})", size=size, name=other["name"], number=other["pid"]),
        )
    disk = machine["disk"]
    speeds = [say("{folder}: {size} free", folder=disk["folder"], size=format_size(disk["free_bytes"]))]
    if disk["write_rate"] is not None:
        speeds.append(say("writes {rate}B/s", rate=with_prefix(disk["write_rate"])))
    if disk["read_rate"] is not None:
        speeds.append(say("reads {rate}B/s", rate=with_prefix(disk["read_rate"])))
    yield say("disk"), join(", ", speeds)
    yield say("allocator"), machine["malloc"]["library"]
    if report["torch"]:
        yield "torch", torch_words(report["torch"])
    packages = [f"{name} {version}" for name, version in machine["packages"].items() if name != "torch"]
    yield say("packages"), ", ".join(packages)
    for name, value in machine["environment"].items():
        yield say("variable"), f"{name}={value}"


def memory_rows(memory: dict[str, Any]) -> Iterator[tuple[str, str]]:
    total = format_size(memory["total_bytes"])
    yield "RAM", say("{total}, {available} available", total=total, available=format_size(memory["available_bytes"]))
    swap = say("none")
    if memory["swap_total_bytes"]:
        used = format_size(memory["swap_used_bytes"])
        swap = say("{used} of {total} in use", used=used, total=format_size(memory["swap_total_bytes"]))
    yield say("swap"), swap
    for limit in memory["limits"]:
        words = join(": ", [say(limit["what"]), format_size(limit["bytes"])])
        yield say("limit"), say("{limit} (binds)", limit=words) if limit["what"] == memory["binding"] else words
    budget = format_size(memory["budget_bytes"])
    margin = format_size(memory["margin_bytes"])
    yield say("available to a run"), say("{budget}, {margin} left free", budget=budget, margin=margin)


def torch_words(torch: dict[str, Any]) -> str:
    words = [torch["version"]]
    if torch["cuda"]:
        words.append(f"CUDA {torch['cuda']}")
    if torch["hip"]:
        words.append(f"ROCm {torch['hip']}")
    words.append(torch["cpu_capability"])
    words.extend(name for name in ("mkl", "onednn") if torch[name])
    return join(", ", [*words, counted(torch["threads"], "thread")])


def device_rows(devices: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    speeds = [f"{WORDS[dtype]} FLOP/s" for dtype in COMPUTE_DTYPES]
    yield say("device"), *speeds, say("copy B/s"), say("computes in")
    for device in devices:
        if device["missing"]:
            continue
        name = device["about"]
        if device["total_bytes"]:
            free = format_size(device["free_bytes"])
            total = format_size(device["total_bytes"])
            name = say("{device}, {free} of {total} free", device=name, free=free, total=total)
        rates = [with_prefix(device["rates"][dtype]) for dtype in COMPUTE_DTYPES]
        yield name, *rates, with_prefix(device["copy_rate"]), WORDS[device["compute"]]


def planned_rows(cases: list[Case]) -> Iterator[tuple[str, ...]]:
    yield say("what"), say("model load"), say("peak"), say("s/step")
    for case in cases:
        if case.spec is None:
            yield case.name, case.refusal
        else:
            plan = case.spec.plan
            yield case.name, format_size(plan.phases["load"]), format_size(plan.peak_bytes), f"{plan.seconds:.2f}"


def measured_rows(case: Case, measured: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    assert case.spec is not None
    plan = case.spec.plan
    yield say("what"), say("predicted"), say("measured"), say("off")
    for what, predicted, size in (
        ("model load", plan.phases["load"], measured["load_bytes"]),
        ("peak", plan.peak_bytes, measured["peak_bytes"]),
    ):
        yield say(what), format_size(predicted), format_size(size), f"{size / predicted - 1:+.0%}"
    seconds = measured["seconds"]
    yield say("s/step"), f"{plan.seconds:.2f}", f"{seconds:.2f}", f"{seconds / plan.seconds - 1:+.0%}"


def with_prefix(rate: float) -> str:
    """A rate with the prefix that people read: `95 G`."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if rate >= factor:
            return f"{rate / factor:.3g} {prefix}"
    return f"{rate:.3g} "
