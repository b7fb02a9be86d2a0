"""Advice of `doctor`: sentences that name a fact about this machine, what it means for a run, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from support.language import join, say
from support.units import GIB, format_size

# From these values on, a fact is worth a sentence:
BUSY_LOAD = 1.5  # runnable processes per core
LARGE_RAM_SHARE = 0.1  # share of the RAM that one other program uses
# Share of a GPU's memory in use. The driver and the context of this process take some of it too.
LARGE_DEVICE_SHARE = 0.2
SLOW_DISK_RATE = 100e6  # bytes per second, or less
USED_SWAP_BYTES = GIB // 4
LOW_DISK_BYTES = 5 * GIB  # free, or less
PEAK_TOLERANCE = 0.05  # share by which a measured peak exceeds the predicted one


def advice_for(report: dict[str, Any]) -> list[str]:
    """The advice that a report calls for; empty where nothing stands out.

    Args:
        report: facts as the command `doctor` collects and prints them with --json.
    """
    machine = report["machine"]
    model = report["model"]
    problems = [say("torch cannot be used: {problem}", problem=report["problem"])] if report["problem"] else []
    return [
        *problems,
        *advice_on_memory(machine["memory"], machine["others"]),
        *advice_on_cores(machine["system"], report["torch"]),
        *advice_on_devices(report["devices"], report["torch"]),
        *advice_on_surroundings(machine),
        *(advice_on_model(model["planned"], model["measured"]) if model else ()),
    ]


def advice_on_memory(memory: dict[str, Any], processes: list[dict[str, Any]]) -> Iterator[str]:
    """Limits on RAM, swap, and other processes that use much of it."""
    if memory["binding"] != "available RAM":
        yield say(
            "{limit} limits this process more than the RAM does: {size} remain for a run, and exceeding it kills the "
            "process; plan for it or raise it",
            limit=say(memory["binding"]),
            size=format_size(memory["budget_bytes"]),
        )
    elif memory["swap_total_bytes"] == 0:
        yield say(
            "there is no swap: a process that exceeds the RAM is killed at once; --memory_budget=auto stays below it"
        )
    if memory["swap_used_bytes"] > USED_SWAP_BYTES:
        yield say(
            "{size} of swap is in use: memory is already short, and swapping makes a run many times slower; close "
            "other programs",
            size=format_size(memory["swap_used_bytes"]),
        )
    for process in processes:
        if process["bytes"] > LARGE_RAM_SHARE * memory["total_bytes"]:
            yield say(
                "{name} (process {number}) uses {size}: end it to give a run that much more",
                name=process["name"],
                number=process["pid"],
                size=format_size(process["bytes"]),
            )


def advice_on_cores(system: dict[str, Any], torch: dict[str, Any]) -> Iterator[str]:
    """Threads against cores, and the load of the machine."""
    cores = system["cores"]
    quota = system["core_quota"] or cores
    threads = torch.get("threads", cores)
    if threads > quota + 0.5:
        yield say(
            "a CPU quota allows {quota} of {cores} cores, but torch uses {threads} threads: set --num_threads={best}",
            quota=f"{quota:g}",
            cores=cores,
            threads=threads,
            best=max(1, int(quota)),
        )
    elif threads < cores:
        yield say(
            "torch uses {threads} of {cores} cores (set by OMP_NUM_THREADS or the launcher); more are faster: "
            "--num_threads={cores}",
            threads=threads,
            cores=cores,
        )
    if (system["load"] or 0) > BUSY_LOAD * cores:
        yield say(
            "the machine is busy (load {load} on {cores} cores): the speeds above are unreliable; run doctor again "
            "when it is idle",
            load=f"{system['load']:g}",
            cores=cores,
        )


def advice_on_devices(devices: list[dict[str, Any]], torch: dict[str, Any]) -> Iterator[str]:
    """The first device that is available, which a run uses, and the build of torch on a Mac."""
    for device in devices:
        if device["missing"]:  # The reason why it cannot be used.
            continue
        if device["compute"] == "float32":
            yield say(
                "{device} has no fast bf16 units, so training computes in fp32; --mixed_precision=bf16 still halves "
                "the weights by storing them in bf16",
                device=device["name"],
            )
        used_bytes = device["total_bytes"] - device["free_bytes"]
        if device["is_separate_memory"] and used_bytes > LARGE_DEVICE_SHARE * device["total_bytes"]:
            yield say(
                "other processes use {size} of {device}: end them to give a run that much more",
                size=format_size(used_bytes),
                device=device["about"],
            )
        break  # Only the first one matters: a run uses no other.
    if torch.get("mac") == "rosetta":
        yield say(
            "this Python runs under Rosetta: an arm64 Python and torch would use the GPU and be several times faster"
        )
    if torch.get("mac") == "apple_silicon" and any("build of torch" in device["missing"] for device in devices):
        yield say("this build of torch has no MPS: install torch from PyPI to use the GPU")


def advice_on_surroundings(machine: dict[str, Any]) -> Iterator[str]:
    """The disk, and the environment variables of torch's allocator."""
    disk = machine["disk"]
    if disk["free_bytes"] < LOW_DISK_BYTES:
        yield say(
            "{folder} has {size} free: a checkpoint takes at least the size of the model; see --output_dir",
            folder=disk["folder"],
            size=format_size(disk["free_bytes"]),
        )
    if disk["read_rate"] is not None and disk["read_rate"] < SLOW_DISK_RATE:
        yield say(
            "the disk reads {rate}/s: keep token shards in RAM-backed or faster storage (--cache_dir)",
            rate=format_size(disk["read_rate"]),
        )
    allocator_settings = machine["environment"].get("PYTORCH_CUDA_ALLOC_CONF")
    if allocator_settings is not None and "expandable_segments" not in allocator_settings:
        yield say(
            "PYTORCH_CUDA_ALLOC_CONF is set without expandable_segments:True, which prevents fragmentation by rows of "
            "varying length"
        )


def advice_on_model(planned: list[dict[str, Any]], measured: dict[str, Any] | None) -> Iterator[str]:
    """Planned runs that do not fit, and how far the measured peak of a step is from the predicted one.

    An `outcome` is empty unless the case does not fit or the step failed.
    """
    too_large = [join(" ", [say(case["kind"]), say(case["label"])]) for case in planned if case["outcome"]]
    if too_large:
        yield say("does not fit: {cases}; `plan` shows settings that need less memory", cases=join(", ", too_large))
    if measured is None:
        return
    deviation = (measured["peak_bytes"] or 0) / measured["predicted_bytes"] - 1
    if measured["outcome"]:
        yield say("the step failed ({reason}); a run with these settings would fail too", reason=measured["outcome"])
    elif deviation > PEAK_TOLERANCE:
        yield say(
            "the prediction was {share} too low here: if memory is short, lower --memory_budget by as much",
            share=f"{deviation:.0%}",
        )
    else:
        yield say("the prediction held: the measured peak differs by {share}", share=f"{deviation:+.0%}")
