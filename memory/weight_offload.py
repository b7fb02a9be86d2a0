"""Candidates for weight offload, in the order in which the plan tries them.

Weights stay on the device; then in the RAM beside it; then in a file, only as many blocks as do not fit otherwise. A later
candidate is taken where no earlier one fits, or where it is clearly faster, as more rows pass at a time. Where `weights_in` is
given, all blocks are offloaded. Numbers are the same everywhere, so a resumed run keeps its weights where they fit now.
Offloaded blocks are recomputed, unless all shall be saved: memory that is left takes in weights first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from language import say
from memory.estimate.disk import is_in_memory
from memory.estimate.weight_offload import pinned_bytes
from memory.estimate.workload import DEVICE, FILE, RAM, ExecutionPlan, Machine, Workload
from settings.declared import Config
from settings.errors import UserError
from settings.fields import AUTO


class WeightOffload(NamedTuple):
    """Where the weights of blocks that do not run are kept.

    Args:
        weights_in: one of `WEIGHTS_IN`.
        offloaded_blocks: how many blocks are kept there; the others stay on the device.
    """

    weights_in: str
    offloaded_blocks: int


def weights_folder(config: Config) -> Path:
    """The folder for the file of offloaded weights."""
    return Path(config.run.output_dir if config.memory.weights_dir == AUTO else config.memory.weights_dir)


def no_disk_at(folder: Path) -> str:
    """The refusal of a folder whose files are themselves in memory."""
    return say(
        "--weights_in = file, would be in {folder}, whose files are themselves in memory; set --weights_dir "
        "to a folder on a disk",
        folder=folder,
    )


def weights_in_to_try(config: Config, machine: Machine, settled: WeightOffload | None = None) -> list[str]:
    """Those of `WEIGHTS_IN` that settings and machine allow, the simplest first.

    Args:
        settled: where the weights of a run are kept already.
    """
    if settled is not None:
        return [settled.weights_in]
    requested = config.memory.weights_in
    if requested == RAM:
        return [RAM if machine.host_bytes else DEVICE]
    if requested == DEVICE:
        return [DEVICE]
    is_on_disk = machine.is_another or not is_in_memory(weights_folder(config))
    if requested == FILE:
        if not is_on_disk:
            raise UserError(no_disk_at(weights_folder(config)))
        return [FILE]
    allowed = [DEVICE]
    if machine.host_bytes:
        allowed.append(RAM)
    if is_on_disk:
        allowed.append(FILE)
    return allowed


def offloaded_candidates(
    weights_in: str,
    config: Config,
    machine: Machine,
    work: Workload,
    candidates: list[ExecutionPlan],
    settled: WeightOffload | None = None,
    *,
    parted: bool = False,
    is_worth: Callable[[ExecutionPlan], bool] = lambda candidate: True,
) -> list[ExecutionPlan]:
    """The same candidates with weights kept in one of `WEIGHTS_IN`.

    Args:
        candidates: whatever they say of offload.
        settled: as of `weights_in_to_try`.
        parted: those of several accumulation passes too; each asks for offloaded weights once more.
        is_worth: whether a candidate is, at its fastest; the others are left out.
    """
    on_device = dict.fromkeys(
        candidate if candidate.weights_in == DEVICE else replace(candidate, weights_in=DEVICE, offloaded_blocks=0)
        for candidate in candidates
    )
    if weights_in == DEVICE:
        return list(on_device)
    whole = [candidate for candidate in on_device if parted or candidate.accumulation_passes == 1]
    total = work.model.num_layers + work.model.num_decoder_layers
    if settled is not None or config.memory.weights_in != AUTO:
        count = total if settled is None else settled.offloaded_blocks
        offloaded = [replace(candidate, weights_in=weights_in, offloaded_blocks=count) for candidate in whole]
    else:
        fewest = min((candidate.saved_blocks for candidate in whole), default=0)
        offloaded = []
        for candidate in whole:
            if candidate.saved_blocks != fewest:
                continue
            first = replace(candidate, weights_in=weights_in, offloaded_blocks=1)
            if is_worth(first):
                offloaded += [replace(first, offloaded_blocks=count) for count in range(1, total + 1)]
    if not machine.host_bytes:  # The device computes in the RAM, which is the budget itself.
        return offloaded
    return [candidate for candidate in offloaded if pinned_bytes(work, candidate) <= machine.host_bytes]
