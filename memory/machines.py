"""The machine to plan for: this one, looked at without torch, or another one by name or file.

What a run computes in and how it goes is decided by facts: the class of the processor, its threads, its memory. Speeds that
were measured here stand beside them, for estimates of time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from devices import machine_file, processor
from devices.cores import computing_threads
from devices.kernels.build import why_impossible
from language import join, say
from memory.estimate.precision import BFLOAT16, FLOAT16, FLOAT32
from memory.estimate.workload import BASE_BYTES, Machine
from memory.system_limits import host_limits, installed_bytes, margin_of
from settings.consistency import ROUGE, SACREBLEU, score_words, writes_answers
from settings.declared import Config
from settings.errors import UserError
from settings.fields import AUTO, nearest, read_settings_file
from settings.precedence import PRESETS_DIR
from units import MIB, parse_size

MACHINES_FILE = PRESETS_DIR / "machines.yaml"
DTYPES = (FLOAT32, BFLOAT16)
SCORES_BYTES = {ROUGE: 17 * MIB, SACREBLEU: 3 * MIB}  # of libraries, by the scores that load them


def this_machine(budget: int | str = AUTO, threads: int | str = AUTO, folder: Path | None = None) -> Machine:
    """This machine's memory and class, in a fraction of a second and without torch; its CPU, also where it has a GPU.

    Args:
        budget: `memory_budget`. threads: `num_threads`. folder: for the file of offloaded weights.
    """
    lowest = min(limit.bytes for limit in host_limits())
    offered = lowest - margin_of(lowest)
    taken = offered if budget == AUTO else min(int(budget), offered)
    # with a budget that is named, what other programs hold does not change the run
    installed = installed_bytes()
    available = lowest if budget == AUTO else installed
    kind, count, no_kernels = processor.here(), computing_threads(threads), why_impossible()
    known = machine_file.of_cpu(processor.describe_here(), count)
    return Machine(
        taken, available, BASE_BYTES, tuple((dtype, kind.rate(dtype, count)) for dtype in DTYPES), speed_class=kind.name,
        measured=() if known is None else known.rates_with(count), has_kernels=not no_kernels, no_kernels=no_kernels,
        measured_disk=None if folder is None else machine_file.disk_rates(folder), installed_bytes=installed,
    )  # fmt: skip


def with_libraries(machine: Machine, config: Config) -> Machine:
    """The machine with what libraries of scores take there, where a run's evaluations score answers."""
    scores = set(score_words(config.metrics.metrics)) if writes_answers(config) else set()
    libraries = sum(size for known, size in SCORES_BYTES.items() if scores & {AUTO, *known})
    return replace(machine, base_bytes=machine.base_bytes + libraries) if machine.base_bytes else machine


def target_machine(name: str, budget: int | str = AUTO) -> Machine:
    """A machine that is not here.

    Args:
        name: an entry of presets/machines.yaml, or a YAML file with the same fields.
    Raises:
        UserError: no such machine, or a field is missing or wrong.
    """
    known = read_settings_file(MACHINES_FILE)
    about: Mapping[str, Any] | None = known.get(name)
    if about is None and Path(name).is_file():
        about = read_settings_file(Path(name))
    if about is None:
        told = "--target = {name}, is not a file and not known{near}; allowed: {known} or a YAML file"
        raise UserError(say(told, name=name, near=nearest(name, known), known=join(", ", known)))
    try:
        available, base = parse_size(about["available"]), parse_size(about["base"]) if about["base"] else 0
        named = (*DTYPES, *({FLOAT16} & about["rates"].keys()))
        rates = tuple((dtype, float(about["rates"][dtype])) for dtype in named)
        machine = Machine(available, available, base, rates, is_another=True)
        if "ram" in about:
            machine = replace(machine, installed_bytes=parse_size(about["ram"]))
        elif base:
            machine = replace(machine, installed_bytes=available)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            "--target = {name}, {error} is missing or wrong; needed: available and base (sizes), rates (float32 "
            "and bfloat16, FLOP/s)",
            name=name,
            error=error,
        ) from None
    return machine if budget == AUTO else replace(machine, budget_bytes=min(int(budget), available))
