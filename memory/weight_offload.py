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


def rests_in_memory(folder: Path) -> str:
    """That a folder is no place for weights that memory has no room for."""
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
    asked, folder = config.memory.weights_in, weights_folder(config)
    is_on_disk = asked not in (AUTO, FILE) or machine.is_another or not is_in_memory(folder)
    if asked == FILE and not is_on_disk:
        raise UserError(rests_in_memory(folder))
    if asked != AUTO:
        return [RAM if asked == RAM and machine.host_bytes else DEVICE if asked == RAM else asked]
    is_alone = config.memory.shard_weights is not True
    return [DEVICE, *([RAM] if machine.host_bytes and is_alone else []), *([FILE] if is_alone and is_on_disk else [])]


def ways_at(
    weights_in: str,
    config: Config,
    machine: Machine,
    work: Workload,
    ways: list[ExecutionPlan],
    settled: WeightOffload | None = None,
    *,
    parted: bool = False,
    is_worth: Callable[[ExecutionPlan], bool] = lambda way: True,
) -> list[ExecutionPlan]:
    """The same ways with weights kept in one of `WEIGHTS_IN`.

    Args:
        ways: whatever they say of offload. settled: as of `weights_in_to_try`.
        parted: those of several accumulation passes too; each asks for offloaded weights once more.
        is_worth: whether a way is, at its fastest; the others are left out.
    """
    here = dict.fromkeys(
        way if way.weights_in == DEVICE else replace(way, weights_in=DEVICE, offloaded_blocks=0) for way in ways
    )
    if weights_in == DEVICE:
        return list(here)
    unshared = [way for way in here if way.shards == 1]
    if not unshared and here and config.memory.weights_in != AUTO:
        raise UserError(
            "--weights_in = {weights_in}, is for weights that are whole on each process; omit shard_weights",
            weights_in=config.memory.weights_in,
        )
    whole = [way for way in unshared if parted or way.accumulation_passes == 1]
    fewest = min((way.saved_blocks for way in whole), default=0)
    total = work.model.num_layers + work.model.num_decoder_layers
    if settled is not None or config.memory.weights_in != AUTO:
        count = total if settled is None else settled.offloaded_blocks
        moved = [replace(way, weights_in=weights_in, offloaded_blocks=count) for way in whole]
    else:
        few = (replace(way, weights_in=weights_in, offloaded_blocks=1) for way in whole if way.saved_blocks == fewest)
        moved = [replace(way, offloaded_blocks=count) for way in few if is_worth(way) for count in range(1, total + 1)]
    if not machine.host_bytes:  # it computes in the RAM, which is the budget itself
        return moved
    return [way for way in moved if pinned_bytes(work, way) <= machine.host_bytes]
