"""Advice for this machine, in plain sentences, chosen by measured facts.

Each piece of advice names the fact, what it means for a run, and what to do about it; where nothing stands out there is
nothing to say.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from commands.diagnosis.trials import trial_name
from language import join, say
from units import GIB, format_size

CROWDED = 1.5  # runnable processes per core from which speeds mean little
HELD_SHARE = 0.2  # of a GPU's memory; its driver and our own context take some
SLOW_DISK = 100e6  # bytes a second
USED_SWAP_BYTES, FULL_DISK_BYTES = GIB // 4, 5 * GIB
TRUSTED = 0.05  # deviation of a prediction


def advice_for(report: dict[str, Any]) -> list[str]:
    """Choose what to say.

    Args:
        report: `machine` (of `commands.diagnosis.inventory`), `torch` and `devices` (of `devices.inventory`; empty where torch
            failed), `problem` (why it failed), `trials` (of `commands.diagnosis.trials`, as plain values).
    """
    machine = report["machine"]
    return [
        *([say("torch cannot be used: {problem}", problem=report["problem"])] if report["problem"] else []),
        *_about_memory(machine["memory"], machine["others"]),
        *_about_cores(machine["system"], report["torch"]),
        *_about_devices(report["devices"], report["torch"], machine["system"]["bf16_units"]),
        *_about_surroundings(machine),
        *_about_trials(report["trials"]),
    ]


def _about_memory(memory: dict[str, Any], others: list[dict[str, Any]]) -> Iterator[str]:
    budget = format_size(memory["budget_bytes"])
    if memory["binding"] != "available RAM":
        yield say(
            "{limit} limits this process more than the RAM does: {size} remain for a run, and exceeding it kills the "
            "process; plan for it or raise it",
            limit=say(memory["binding"]), size=budget,
        )  # fmt: skip
    if memory["swap_used_bytes"] > USED_SWAP_BYTES:
        used = format_size(memory["swap_used_bytes"])
        yield say(
            (
                "{size} of swap is in use: memory is already short, and swapping makes a run many times slower; close "
                "other programs"
            ),
            size=used,
        )
    if memory["swap_total_bytes"] == 0 and memory["binding"] == "available RAM":
        yield say(
            "there is no swap: a process that exceeds the RAM is killed at once; --memory_budget=auto stays below it"
        )
    for other in others:
        if other["bytes"] > 0.1 * memory["total_bytes"]:
            held = format_size(other["bytes"])
            told = "{name} (process {number}) uses {size}: end it to give a run that much more"
            yield say(told, name=other["name"], number=other["pid"], size=held)


def _about_cores(system: dict[str, Any], torch: dict[str, Any]) -> Iterator[str]:
    cores, quota = system["cores"], system["core_quota"]
    threads = torch.get("threads", cores)
    if quota is not None and threads > quota + 0.5:
        yield say(
            "a CPU quota allows {quota} of {cores} cores, but torch uses {threads} threads: set --num_threads={best}",
            quota=f"{quota:g}", cores=cores, threads=threads, best=max(1, int(quota)),
        )  # fmt: skip
    elif threads < cores:
        yield say(
            "torch uses {threads} of {cores} cores (set by OMP_NUM_THREADS or the launcher); more are faster: "
            "--num_threads={cores}",
            threads=threads, cores=cores,
        )  # fmt: skip
    if system["load"] is not None and system["load"] > CROWDED * cores:
        told = (
            "the machine is busy (load {load} on {cores} cores): the speeds above are unreliable; run doctor again when it is "
            "idle"
        )
        yield say(told, load=f"{system['load']:g}", cores=cores)


def _about_devices(devices: list[dict[str, Any]], torch: dict[str, Any], bf16_units: str | None) -> Iterator[str]:
    here = [device for device in devices if not device["missing"]]
    if not here:
        return
    best = here[0]
    rates = best["rates"]
    if best["compute"] == "bfloat16":
        times = rates["bfloat16"] / rates["float32"]
        told = "{device} multiplies bf16 {times} times as fast as fp32: mixed_precision=auto computes in bf16"
        yield say(told, device=best["name"], times=f"{times:.1f}")
    elif best["compute"] == "float16":
        times = rates["float16"] / rates["float32"]
        told = (
            "{device} has no bf16 and multiplies fp16 {times} times as fast as fp32: mixed_precision=auto computes in fp16 with a "
            "scaled loss, the residual stream in fp32"
        )
        yield say(told, device=best["name"], times=f"{times:.1f}")
    else:
        times = max(1.0, rates["float32"] / rates["bfloat16"])
        is_x86 = best["name"] == "cpu" and torch.get("cpu_capability", "").startswith("AVX")
        units = say("no AMX or AVX512-BF16 units") if is_x86 and not bf16_units else say("no fast bf16 units")
        yield say(
            "{device} has {units}: bf16 takes {times} times as long as fp32, so training computes in fp32; "
            "--mixed_precision=bf16 still halves the weights by storing them in bf16",
            device=best["name"], units=units, times=f"{times:.0f}",
        )  # fmt: skip
    held = best["total_bytes"] - best["free_bytes"]
    if best["is_separate_memory"] and held > HELD_SHARE * best["total_bytes"]:
        told = "other processes use {size} of {device}: end them to give a run that much more"
        yield say(told, size=format_size(held), device=best["about"])
    if torch.get("mac") == "rosetta":
        yield say(
            "this Python runs under Rosetta: an arm64 Python and torch would use the GPU and be several times faster"
        )
    reasons = [device for device in devices if device["missing"] and "build of torch" in device["missing"]]
    if best["name"] == "cpu" and torch.get("mac") == "apple_silicon" and reasons:
        yield say("this build of torch has no MPS: install torch from PyPI to use the GPU")


def _about_surroundings(machine: dict[str, Any]) -> Iterator[str]:
    disk, malloc, variables = machine["disk"], machine["malloc"], machine["environment"]
    if disk["free_bytes"] < FULL_DISK_BYTES:
        told = "{folder} has {size} free: a checkpoint takes at least the size of the model; see --output_dir"
        yield say(told, folder=disk["folder"], size=format_size(disk["free_bytes"]))
    if disk["read_rate"] is not None and disk["read_rate"] < SLOW_DISK:
        rate = format_size(disk["read_rate"])
        yield say("the disk reads {rate}/s: keep token shards in RAM-backed or faster storage (--cache_dir)", rate=rate)
    if not malloc["is_glibc"]:
        told = "the allocator is {library}: freed memory cannot be returned, so peaks are slightly above the plan"
        yield say(told, library=malloc["library"])
    if "expandable_segments" not in variables.get("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments"):
        yield say(
            "PYTORCH_CUDA_ALLOC_CONF is set without expandable_segments:True, which prevents fragmentation by rows of "
            "varying length"
        )


def _about_trials(trials: list[dict[str, Any]]) -> Iterator[str]:
    failed = [trial for trial in trials if trial["outcome"] and not trial["outcome"].startswith("not tried")]
    if failed:
        labels = join(", ", [trial_name(trial["kind"], trial["label"]) for trial in failed])
        yield say("failed: {trials}; a run with these settings would fail too", trials=labels)
    pairs = [(t["measured_bytes"], t["predicted_bytes"]) for t in trials if t["kind"] != "model load"]
    off = [measured / predicted - 1 for measured, predicted in pairs if measured and predicted]
    if off and max(off) > TRUSTED:
        yield say(
            "predictions were up to {share} too low here: if memory is short, lower --memory_budget by as much",
            share=f"{max(off):.0%}",
        )
    elif off:
        told = "predictions held: measured peaks differed by {least} to {most}"
        yield say(told, least=f"{min(off):+.0%}", most=f"{max(off):+.0%}")
