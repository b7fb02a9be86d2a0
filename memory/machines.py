"""The machine to plan for: this one, looked at without torch, or another one by name or file.

What a run computes in and how it goes is decided by facts: the class of the processor, its threads, its memory. Speeds
that were measured here stand beside them, for estimates of time.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from devices import machine_file, processor
from devices.cores import computing_threads
from devices.kernels.build import why_impossible
from devices.processor import AVX2
from devices.torch_compiler import why_not_for_cpu
from memory.estimate.precision import BFLOAT16, FLOAT16, FLOAT32
from memory.estimate.workload import BASE_BYTES, Machine
from memory.system_limits import host_limits, installed_bytes, margin_of
from settings.consistency import ROUGE, SACREBLEU, score_words, writes_answers
from settings.declared import MetricsConfig
from settings.errors import UserError
from settings.fields import AUTO, nearest, read_settings_file
from settings.precedence import PRESETS_DIR
from support.language import join
from support.units import MIB, parse_size

MACHINES_FILE = PRESETS_DIR / "machines.yaml"
DTYPES = (FLOAT32, BFLOAT16)
SCORES_BYTES = {ROUGE: 17 * MIB, SACREBLEU: 3 * MIB}  # Libraries take so much, by the scores that load them.


def this_machine(budget: int | str = AUTO, threads: int | str = AUTO, folder: Path | None = None) -> Machine:
    """This machine's memory and class, in a fraction of a second and without torch; its CPU, also where it has a GPU.

    Args:
        budget: `memory_budget`. threads: `num_threads`. folder: for the file of offloaded weights.
    """
    lowest = min(limit.bytes for limit in host_limits())
    budget_bytes = lowest - margin_of(lowest)
    installed = installed_bytes()
    available = lowest
    if budget != AUTO:
        budget_bytes = min(int(budget), budget_bytes)
        available = installed  # With a budget that is named, what other programs take does not change the run.
    kind = processor.here()
    num_threads = computing_threads(threads)
    no_kernels = why_impossible()
    measured = machine_file.of_cpu(processor.describe_here(), num_threads)
    return Machine(
        budget_bytes,
        available,
        BASE_BYTES,
        tuple((dtype, kind.rate(dtype, num_threads)) for dtype in DTYPES),
        speed_class=kind.name,
        measured=measured.rates_with(num_threads) if measured else (),
        has_kernels=not no_kernels,
        no_kernels=no_kernels,
        no_compiler=why_not_for_cpu(),
        measured_disk=machine_file.disk_rates(folder) if folder else None,
        installed_bytes=installed,
    )


def with_libraries(machine: Machine, metrics: MetricsConfig) -> Machine:
    """The machine with what libraries of scores take there, where a run's evaluations score answers."""
    if not machine.base_bytes or not writes_answers(metrics):
        return machine
    scores = set(score_words(metrics.metrics))
    libraries = sum(size for words, size in SCORES_BYTES.items() if scores & {*words})
    return replace(machine, base_bytes=machine.base_bytes + libraries)


def target_machine(name: str, budget: int | str = AUTO) -> Machine:
    """A machine that is not here.

    Args:
        name: an entry of presets/machines.yaml, or a YAML file with the same fields.
    Raises:
        UserError: no such machine, or a field is missing or wrong.
    """
    machines = read_settings_file(MACHINES_FILE)
    if name not in machines and not Path(name).is_file():
        raise UserError(
            "--target = {name}, is not a file and not known{near}; allowed: {known} or a YAML file",
            name=name,
            near=nearest(name, machines),
            known=join(", ", machines),
        )
    facts = machines[name] if name in machines else read_settings_file(Path(name))
    try:
        available = parse_size(facts["available"])
        base = parse_size(facts["base"]) if facts["base"] else 0
        dtypes = (*DTYPES, *({FLOAT16} & facts["rates"].keys()))
        machine = Machine(
            available if budget == AUTO else min(int(budget), available),
            available,
            base,
            tuple((dtype, float(facts["rates"][dtype])) for dtype in dtypes),
            speed_class=str(facts.get("class", AVX2.name if base else "cuda")),
            is_another=True,
        )
        if machine.speed_class != "mps":
            machine = replace(machine, no_compiler="")
        if base or "ram" in facts:
            machine = replace(machine, installed_bytes=parse_size(facts.get("ram", facts["available"])))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            "--target = {name}, {error} is missing or wrong; needed: available and base (sizes), rates (float32 "
            "and bfloat16, FLOP/s)",
            name=name,
            error=error,
        ) from None
    return machine
