"""Plans over a grid of models, machines, modes and budgets, beside recorded ones: `python -m benchmarks.plans`.

Nothing is trained. `benchmarks/plans.json` holds for each case its budgets, from the least that fits to plenty, with
the peak and the seconds of a step that were planned when it was recorded. A case is lost where it no longer fits, or
where its step takes more than 5% longer. `--record` writes the file anew; `--cases=WORDS` takes those whose names
contain all words.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from devices.processor import AMX_BF16, AVX2, AVX512_BF16, Processor
from memory.estimate.workload import Machine
from memory.machines import MACHINES_FILE, target_machine
from memory.plan import Plan, plan
from settings.declared import Config
from settings.errors import DoesNotFit
from settings.fields import read_settings_file
from settings.loading import load
from support.units import GIB, MIB

RECORD = Path(__file__).with_suffix(".json")
MOST_SLOWER = 1 / 0.95
PLENTY = 1000 * GIB
TEXT = {"objective": "span"}
LORA = {"model_preset": "t5-base", "is_finetune": "True", "lora_rank": "8", "objective": "pairs"}
WORKS = {
    **{name: {"model_preset": name, **TEXT} for name in ("t5-small", "t5-base", "chatlm-0.2b", "byt5-small", "t5-3b")},
    "flan-t5-large": {"model_preset": "t5-v1.1-large", **TEXT},
    "adamw": {"model_preset": "t5-small", "optimizer": "adamw", "max_grad_norm": "1.0", **TEXT},
    "sequence": {"model_preset": "t5-base", "objective": "sequence", "head": "sequence", "labels": "3"},
    "token": {"model_preset": "tiny", "objective": "token", "head": "token", "labels": "9"},
    **{f"lora-{base}": {**LORA, "lora_base": base} for base in ("auto", "fp32", "bf16", "int8", "int4")},
    "preferences": {"model_preset": "t5-small"},
}
LENGTHS = {"short": (32, 16, 64), "long": (512, 114, 16)}  # source tokens, target tokens, rows of a step
LEVELS = {"auto": (1.0, 1.15, 1.5, 2.5, 100.0), "low": (1.0, 1.5, 100.0), "ultra": (1.0, 1.5, 100.0)}
WORKS_EVERYWHERE = ("t5-small", "t5-base", "lora-auto")  # the others on some machines of each kind
SOME_MACHINES = ("laptop_8gb", "mac_8gb", "gpu_8gb", "gpu_16gb_t4", "avx2", "avx512_bf16", "cuda")
MODE_MACHINES = ("gpu_8gb", "avx2", "avx512_bf16", "cuda")


def machines() -> dict[str, Machine]:
    """Machines of `--target`, the classes of processors with compiled kernels, and a CUDA card as it describes
    itself.
    """
    of_target = {name: target_machine(name) for name in read_settings_file(MACHINES_FILE)}
    of_class = {name: of_processor(kind) for name, kind in PROCESSORS.items()}
    cuda = Machine(
        16 * GIB,
        16 * GIB,
        base_bytes=0,
        rates=(("float32", 2e13), ("bfloat16", 3e14)),
        pads_attention=True,
        fuses_attention=True,
        widens_whole=True,
        host_bytes=24 * GIB,
        speed_class="cuda",
        device="card",
        has_own_memory=True,
    )
    return {**of_target, **of_class, "cuda": cuda}


PROCESSORS = {"avx2": AVX2, "avx512_bf16": AVX512_BF16, "amx_bf16": AMX_BF16}


def of_processor(kind: Processor) -> Machine:
    """Two threads of a class of processors."""
    rates = tuple((dtype, kind.rate(dtype, 2)) for dtype in ("float32", "bfloat16"))
    return Machine(16 * GIB, 16 * GIB, rates=rates, speed_class=kind.name, has_kernels=True)


def cases() -> Iterator[tuple[str, Config, Machine, int, int]]:
    """Name, settings, machine, source and target tokens of each case."""
    known = machines()
    for work, flags in WORKS.items():
        for length, (source, target, rows) in LENGTHS.items():
            for mode in LEVELS:
                command = "dpo" if work == "preferences" else "train"
                size = {"effective_batch_size": str(rows), "memory_mode": mode}
                config = load(command, {"train_file": "any", **flags, **size})
                has_decoder = config.model.num_decoder_layers > 0
                # As long as a row that has such a target can be:
                tokens = config.task.longest_target(
                    config.with_changes(max_target_len=target).data, source, has_decoder
                )
                for name, machine in known.items():
                    among = MODE_MACHINES if mode != "auto" else SOME_MACHINES
                    if name in among or (mode == "auto" and work in WORKS_EVERYWHERE):
                        yield f"{work} {length} {mode} {name}", config, machine, source, tokens


def planned(config: Config, machine: Machine, budget: int, source: int, target: int) -> Plan | None:
    """The plan within a budget; None where none fits."""
    try:
        return plan(config, replace(machine, budget_bytes=budget), source_tokens=source, target_tokens=target)
    except DoesNotFit:
        return None


def least_budget(config: Config, machine: Machine, source: int, target: int) -> int:
    """The budget in MiB that a refusal names as enough."""
    try:
        plan(config, replace(machine, budget_bytes=MIB), source_tokens=source, target_tokens=target)
    except DoesNotFit as error:
        return int(re.findall(r"--memory_budget=(\d+)M", "\n".join(error.problems))[-1])
    raise AssertionError("one MiB is not enough for a run")


def describe(made: Plan) -> str:
    """A choice in one word for each of its parts."""
    c = made.choice
    cut = f"{c.batch_size_per_gpu}x{c.micro_batches_per_pass}x{c.accumulation_passes}"
    chunk = c.loss_chunk_bytes // MIB
    return (
        f"{cut} saved{c.saved_blocks} {c.storage}/{c.compute} loss{chunk} {c.malloc} {c.weights_in}{c.offloaded_blocks}"
    )


def record(words: list[str]) -> dict[str, list[list[Any]]]:
    """What is planned now, at budgets from the least on."""
    rows: dict[str, list[list[Any]]] = {}
    for name, config, machine, source, target in cases():
        if not all(word in name.split() for word in words):
            continue
        least = least_budget(config, machine, source, target)
        rows[name] = []
        for factor in LEVELS[config.memory.memory_mode]:
            budget = int(least * factor) + 1
            made = planned(config, machine, budget * MIB, source, target)
            if made is not None:
                rows[name].append([budget, made.peak_bytes // MIB, float(f"{made.seconds:.4g}"), describe(made)])
    return rows


def compare(words: list[str], before: dict[str, list[list[Any]]]) -> None:
    """Print the cases that are lost, those whose peak has grown in a saving mode, and how many there are."""
    ratios, lost = list[float](), 0
    for name, config, machine, source, target in cases():
        if not all(word in name.split() for word in words):
            continue
        for budget, peak, seconds, *choice in before[name]:
            made = planned(config, machine, budget * MIB, source, target)
            ratio = made.seconds / seconds if made else float("inf")
            ratios.append(ratio)
            is_lost = ratio > MOST_SLOWER
            lost += is_lost
            grown = made.peak_bytes / MIB / peak if made else 0.0
            if is_lost or (config.memory.memory_mode != "auto" and grown > 1.08):
                now = describe(made) if made else "does not fit"
                print(f"{name} {budget}M: {ratio:.3f} of the seconds, {grown:.2f} of the peak: {now}; before {choice}")
    print(f"{len(ratios)} cases, {lost} lost; seconds new / old at most {max(ratios):.3f}, least {min(ratios):.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--cases", default="")
    parser.add_argument("--file", type=Path, default=RECORD)
    options = parser.parse_args()
    if options.record:
        rows = [f"{json.dumps(name)}: {json.dumps(row)}" for name, row in record(options.cases.split()).items()]
        options.file.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf8")
    else:
        compare(options.cases.split(), json.loads(options.file.read_text(encoding="utf8")))
