"""What does `doctor` report? The machine and its limits, what a model really takes here, and what to do about it.

Everything that could fail or be killed runs in a process of its own: torch itself, which may not even be importable, and
each trial of a model. So the report always comes to its end, and a failure is a line of it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from childproc import call
from commands.diagnosis.advice import advice_for
from commands.diagnosis.inventory import take_inventory
from commands.diagnosis.page import print_findings, print_machine
from commands.diagnosis.trials import run_trials, trials_of
from config import Config, T5ModelConfig, UserError
from devices import machine_file
from language import english, say
from memory.cost.prediction import Machine
from memory.homes import weights_folder
from memory.machines import this_machine
from settings.fields import AUTO, counted

ROOT = str(Path(__file__).resolve().parent.parent)
START = f"""import json, os, sys
sys.path.insert(0, {ROOT!r})
from devices.environment import prepare_environment
prepare_environment()  # before torch is imported
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # whatever a library prints must not mix with the answer
from devices.inventory import look
answers.write(json.dumps(look(sys.argv[1])))"""
DEVICE_SECONDS = 60.0


def doctor(config: Config) -> None:
    """Examine, and print it: as tables, each as soon as it is known, or as JSON for programs.

    Raises:
        UserError: the model or the device that was named is not there. KeyboardInterrupt: what was tried till then is shown.
    """
    measures = config.given("model_preset") or config.checkpoint.model != AUTO
    config = _of_model(config)
    report = examine(config)
    if not config.plan.json:
        print_machine(report)
        sys.stdout.flush()
    was_stopped = measures and not report["problem"] and not _try_model(config, report)
    report["advice"] = advice_for(report)
    if config.plan.json:
        print(json.dumps(_in_english(report), indent=1))
    else:
        print_findings(report)
    if was_stopped:
        raise KeyboardInterrupt


def _in_english(report: dict[str, Any]) -> dict[str, Any]:
    trials = [{name: english(value) for name, value in trial.items()} for trial in report["trials"]]
    return {**report, "trials": trials, "advice": [english(sentence) for sentence in report["advice"]]}


def _of_model(config: Config) -> Config:
    """The settings with the shape of the model that was named.

    Raises:
        UserError: it is not there, or no model.
    """
    if config.checkpoint.model == AUTO:
        return config
    shape = call(shape_of, config)
    return replace(config, model=replace(shape, dropout_rate=config.model.dropout_rate))


def shape_of(config: Config) -> T5ModelConfig:
    """The shape of the model that the settings name; imports torch."""
    from commands.loading import find_model
    from model.formats.shape_file import read_config
    from training.start.adapted import base_of

    return read_config(base_of(find_model(config)))


def examine(config: Config) -> dict[str, Any]:
    """What is known of the machine, as plain values.

    Returns:
        `machine`, `torch`, `devices`, `problem` ("" where torch works), `trials`, of which there are none yet.
    """
    folder = weights_folder(config)
    report: dict[str, Any] = {"machine": take_inventory(folder)}
    disk = report["machine"]["disk"]
    if disk["read_rate"] and disk["write_rate"]:
        machine_file.keep_disk(folder, disk["read_rate"], disk["write_rate"])
    found, problem = look_at_devices(config.run.device)
    return {
        **report, "torch": found.get("torch", {}), "devices": found.get("devices", []), "problem": problem, "trials": []
    }  # fmt: skip


def _try_model(config: Config, report: dict[str, Any]) -> bool:
    """Add `model`, `budget_bytes` and the `trials` of the model to the report; each is announced, for it may take minutes.

    Returns:
        whether all came to their end. False: somebody interrupted.
    """
    machine = machine_of(config, report["devices"])
    trials = trials_of(config, machine)
    named = config.model_preset if config.checkpoint.model == AUTO else config.checkpoint.model
    report |= {"model": named, "budget_bytes": machine.budget_bytes}
    told = "trying {model}: {trials}; Ctrl-C shows what is known till then"
    print(say(told, model=named, trials=counted(len(trials), "trial")), file=sys.stderr)
    try:
        for result in run_trials(trials, machine, partial(print, file=sys.stderr, flush=True)):
            report["trials"].append(result.as_dict())
    except KeyboardInterrupt:
        return False
    return True


def look_at_devices(requested: str = AUTO) -> tuple[dict[str, Any], str]:
    """Ask torch in a child process: (`torch`, `devices`), and why there is no answer, else ""."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", START, requested], capture_output=True, timeout=DEVICE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return {}, f"it did not answer within {DEVICE_SECONDS:.0f} s"
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        return {}, lines[-1] if lines else f"its process ended with exit code {done.returncode}"
    return json.loads(done.stdout), ""


def machine_of(config: Config, devices: list[dict[str, Any]]) -> Machine:
    """What a plan needs to know of the device that a run would take: nominal rates, and beside them those measured there.

    Raises:
        UserError: the device asked for is not here.
    """
    here = [device for device in devices if not device["missing"]]
    asked = config.run.device
    chosen = next((device for device in here if asked in (AUTO, device["name"])), None)
    if chosen is None:
        names = ", ".join(dict.fromkeys(device["name"] for device in here))
        raise UserError(f"--device = {asked}, is not here; here: {names}; use one of them or auto")
    machine = this_machine(config.memory.memory_budget, folder=weights_folder(config))
    nominal = chosen["nominal"]
    machine = replace(
        machine,
        rates=tuple(nominal.items()),
        measured=tuple((name, rate) for name, rate in chosen["rates"].items() if name in nominal),
        speed_class=chosen["class"],
        pads_attention=chosen["name"] != "cpu",
        fuses_attention=chosen["name"] == "cuda",
        widens_whole=chosen["name"] != "cpu",
        has_kernels=machine.has_kernels and chosen["name"] == "cpu",
    )
    if not chosen["is_separate_memory"]:
        return machine
    asked_bytes = config.memory.memory_budget
    offered = int(chosen["free_bytes"])
    budget = offered if asked_bytes == AUTO else min(offered, int(asked_bytes))
    host = machine.budget_bytes if chosen["copies_beside"] else 0
    return replace(machine, base_bytes=0, budget_bytes=budget, host_bytes=host)
