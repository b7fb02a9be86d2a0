"""`doctor`: the machine and its limits, what a model really takes here, and what to do about it.

Everything that could fail or be killed runs in a process of its own: torch itself, which may not even be importable, and each trial
of a model. So the report always comes to its end, and a failure is a line of it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from childproc import TIME, ChildDied, call
from commands.diagnosis.advice import advice_for
from commands.diagnosis.device_check import check
from commands.diagnosis.inventory import take_inventory
from commands.diagnosis.trials import run_trials, trial_name, trials_of
from devices import machine_file
from devices.environment import prepare_environment
from language import english, join, say
from memory.estimate.precision import COMPUTE_DTYPES, WORDS
from memory.estimate.workload import Machine
from memory.weight_offload import weights_folder
from settings.declared import Config, T5ModelConfig
from settings.fields import AUTO, counted
from training.report.progress import Progress
from units import format_size

DEVICE_SECONDS = 60.0
PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"))


def doctor(config: Config) -> None:
    """Examine, and print it: as tables, each as soon as it is known, or as JSON for programs.

    Raises:
        UserError: the model or the device that was named is not there, or a check of it failed. KeyboardInterrupt: what was tried till then is shown.
    """
    if config.plan.check:
        check(config)
        return
    is_named = config.checkpoint.model != AUTO
    if is_named:
        shape = call(shape_of, config)
        config = replace(config, model=replace(shape, dropout_rate=config.model.dropout_rate))
    folder, was_stopped = weights_folder(config), False
    facts = take_inventory(folder)
    if facts["disk"]["read_rate"] and facts["disk"]["write_rate"]:
        machine_file.keep_disk(folder, facts["disk"]["read_rate"], facts["disk"]["write_rate"])
    report: dict[str, Any] = {"machine": facts, "torch": {}, "devices": [], "problem": "", "trials": []}
    machine = None
    try:  # many threads use many seconds of processor time in one
        limits = {"max_cpu": 100 * DEVICE_SECONDS, "patience": 0.01}
        measures = config.typed("model_preset") or is_named
        found, machine = call(look, config, measures, setup=prepare_environment, is_quiet=True, **limits)
        report |= found
    except ChildDied as death:
        report["problem"] = (
            say("it did not answer within {device_seconds:.0f} s", device_seconds=DEVICE_SECONDS)
            if death.reason == TIME
            else str(death)
        )
    if not config.plan.json:
        _show_machine(report)
        sys.stdout.flush()
    if machine is not None:  # each trial is announced, for it may take minutes
        trials, named = trials_of(config), config.checkpoint.model if is_named else config.model_preset
        report |= {"model": named, "budget_bytes": machine.budget_bytes}
        told = "trying {model}: {trials}; Ctrl-C shows the results so far"
        print(say(told, model=named, trials=counted(len(trials), "trial")), file=sys.stderr)
        try:
            for row in run_trials(trials, machine, partial(print, file=sys.stderr, flush=True)):
                report["trials"].append(row)
        except KeyboardInterrupt:
            was_stopped = True
    report["advice"] = advice_for(report)
    if config.plan.json:
        trials_told = [{name: english(value) for name, value in trial.items()} for trial in report["trials"]]
        advice = [english(sentence) for sentence in report["advice"]]
        print(json.dumps({**report, "trials": trials_told, "advice": advice}, indent=1))
    else:
        _show_findings(report)
    if was_stopped:
        raise KeyboardInterrupt


def shape_of(config: Config) -> T5ModelConfig:
    """The shape of the model that the settings name; imports torch.

    Raises:
        UserError: it is not there, or no model.
    """
    from commands.loading import find_model
    from model.formats.shape_file import read_config

    return read_config(find_model(config).base)


def look(config: Config, measures: bool) -> tuple[dict[str, Any], Machine | None]:
    """`torch` and `devices`, and the machine that a run would plan for; imports torch."""
    from devices import inventory
    from training.setup.plan import machine_for

    found = inventory.look(config.run.device)
    return found, machine_for(config) if measures else None


# --- tables


def _show_machine(report: dict[str, Any]) -> None:
    """What is known before a model is tried, which may take minutes."""
    progress = Progress(1)
    progress.table(say("this machine"), list(_machine_rows(report)))
    if report["devices"]:
        progress.table(say("devices, measured"), list(_device_rows(report["devices"])))
        for device in report["devices"]:
            if device["missing"]:
                progress.note(say("{device} is missing: {why}", device=device["name"], why=device["missing"]))


def _show_findings(report: dict[str, Any]) -> None:
    progress = Progress(1)
    if report["trials"]:
        told = "{model}, each in its own process, budget {budget}"
        title = say(told, model=report["model"], budget=format_size(report["budget_bytes"]))
        progress.table(title, list(_trial_rows(report["trials"])))
    advice = report["advice"] or [say("nothing to improve on this machine")]
    progress.table(say("advice"), [("-", sentence) for sentence in advice])


def _machine_rows(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    machine, torch = report["machine"], report["torch"]
    system, memory, disk = machine["system"], machine["memory"], machine["disk"]
    quota = [] if system["core_quota"] is None else [say("a quota of {cores}", cores=f"{system['core_quota']:g}")]
    load = [] if system["load"] is None else [say("load {load}", load=f"{system['load']:g}")]
    yield say("system"), f"{system['platform']}, Python {system['python']}"
    yield say("processor"), join(", ", [system["processor"], counted(system["cores"], "core"), *quota, *load])
    yield "", say("class: {name} ({instructions})", name=say(system["class"]), instructions=say(system["instructions"]))
    yield say("compiled kernels"), system["kernels"]
    total, available = format_size(memory["total_bytes"]), format_size(memory["available_bytes"])
    yield "RAM", say("{total}, {available} available", total=total, available=available)
    swap = {name: format_size(memory[f"swap_{name}_bytes"]) for name in ("used", "total")}
    yield say("swap"), say("{used} of {total} in use", **swap) if memory["swap_total_bytes"] else say("none")
    for limit in memory["limits"]:
        told = join(": ", [say(limit["what"]), format_size(limit["bytes"])])
        yield say("limit"), say("{limit} (binds)", limit=told) if limit["what"] == memory["binding"] else told
    budget, margin = format_size(memory["budget_bytes"]), format_size(memory["margin_bytes"])
    yield say("available to a run"), say("{budget}, {margin} left free", budget=budget, margin=margin)
    for other in machine["others"]:
        held = {"size": format_size(other["bytes"]), "name": other["name"], "number": other["pid"]}
        yield say("used by other programs"), say("{size} by {name} ({number})", **held)
    free = say("{folder}: {size} free", folder=disk["folder"], size=format_size(disk["free_bytes"]))
    writes = [] if disk["write_rate"] is None else [say("writes {rate}B/s", rate=_metric(disk["write_rate"]))]
    reads = [] if disk["read_rate"] is None else [say("reads {rate}B/s", rate=_metric(disk["read_rate"]))]
    yield say("disk"), join(", ", [free, *writes, *reads])
    yield say("allocator"), machine["malloc"]["library"]
    if torch:
        libraries = [f"{name} {torch[key]}" for name, key in (("CUDA", "cuda"), ("ROCm", "hip")) if torch[key]]
        libraries += [torch["cpu_capability"], *(name for name in ("mkl", "onednn") if torch[name])]
        yield "torch", join(", ", [torch["version"], *libraries, counted(torch["threads"], "thread")])
    packages = machine["packages"].items()
    yield say("packages"), ", ".join(f"{name} {version}" for name, version in packages if name != "torch")
    for name, value in machine["environment"].items():
        yield say("variable"), f"{name}={value}"


def _device_rows(devices: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    speeds = [f"{WORDS[dtype]} FLOP/s" for dtype in COMPUTE_DTYPES]
    yield say("device"), *speeds, say("copy B/s"), say("computes in")
    for device in devices:
        if device["missing"]:
            continue
        rates = [_metric(device["rates"][dtype]) for dtype in COMPUTE_DTYPES]
        name, free, total = device["about"], format_size(device["free_bytes"]), format_size(device["total_bytes"])
        if device["total_bytes"]:
            name = say("{device}, {free} of {total} free", device=name, free=free, total=total)
        yield name, *rates, _metric(device["copy_rate"]), WORDS[device["compute"]]


def _trial_rows(trials: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    yield say("what"), say("predicted"), say("measured"), say("off"), say("s/step"), say("tokens/s"), ""
    for trial in trials:
        predicted, measured, seconds = trial["predicted_bytes"], trial["measured_bytes"], trial["seconds"]
        yield (
            trial_name(trial["kind"], trial["label"]), *("" if size is None else format_size(size) for size in (predicted, measured)),
            f"{measured / predicted - 1:+.0%}" if measured and predicted else "", f"{seconds:.2f}" if seconds else "",
            f"{trial['tokens'] / seconds:,.0f}" if seconds else "", trial["outcome"],
        )  # fmt: skip


def _metric(rate: float) -> str:
    """A rate with the prefix that people read: `95 G`."""
    for factor, prefix in PREFIXES:
        if rate >= factor:
            return f"{rate / factor:.3g} {prefix}"
    return f"{rate:.3g} "
