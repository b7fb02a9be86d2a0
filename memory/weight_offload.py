"""Candidates for weight offload, in the order in which the plan tries them.

Where they are computed; then in the RAM beside a device; then in a file, only as many blocks as do not fit otherwise. A later
one is taken where no earlier one fits, or where it is clearly faster, as more rows pass at a time. Named by `weights_in`, all blocks rest there. Numbers are the same everywhere, so a run that is resumed
rests where it fits now. Blocks that rest elsewhere are recomputed, unless all shall be saved: memory that is left takes in
weights first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from language import say
from memory.estimate.disk import is_in_memory
from memory.estimate.peaks import offloaded_bytes
from memory.estimate.weight_offload import pinned_bytes
from memory.estimate.workload import DEVICE, FILE, RAM, ExecutionPlan, Machine, Workload
from settings.declared import Config
from settings.errors import UserError
from settings.fields import AUTO

Homes = tuple[str, int]  # where weights rest, and of how many blocks elsewhere


def weights_folder(config: Config) -> Path:
    """The folder on whose disk weights rest that do so in a file."""
    return Path(config.run.output_dir if config.memory.weights_dir == AUTO else config.memory.weights_dir)


def rests_in_memory(folder: Path) -> str:
    """That a folder is no place for weights that memory has no room for."""
    return say(
        "--weights_in = file, would be in {folder}, whose files are themselves in memory; set --weights_dir "
        "to a folder on a disk",
        folder=folder,
    )


def homes_to_try(config: Config, machine: Machine, settled: Homes | None = None) -> list[str]:
    """The homes that settings and machine allow, the simplest first.

    Args:
        settled: where the weights of a run rest already.
    """
    if settled is not None:
        return [settled[0]]
    asked, folder = config.memory.weights_in, weights_folder(config)
    is_on_disk = asked not in (AUTO, FILE) or machine.is_another or not is_in_memory(folder)
    if asked == FILE and not is_on_disk:
        raise UserError(rests_in_memory(folder))
    if asked != AUTO:
        return [RAM if asked == RAM and machine.host_bytes else DEVICE if asked == RAM else asked]
    return [DEVICE, *([RAM] if machine.host_bytes else []), *([FILE] if is_on_disk else [])]


def ways_at(
    home: str,
    config: Config,
    machine: Machine,
    work: Workload,
    ways: list[ExecutionPlan],
    settled: Homes | None = None,
    *,
    parted: bool = False,
    is_worth: Callable[[ExecutionPlan], bool] = lambda way: True,
) -> list[ExecutionPlan]:
    """The same ways with weights resting there.

    Args:
        ways: whatever they say of homes. settled: as of `homes_to_try`.
        parted: those of several accumulation passes too; each asks for the weights elsewhere once more.
        is_worth: whether a way is, at its fastest; the others are left out.
    """
    here = dict.fromkeys(
        way if way.weights_in == DEVICE else replace(way, weights_in=DEVICE, away_blocks=0) for way in ways
    )
    if home == DEVICE:
        return list(here)
    suited = [way for way in here if parted or way.accumulation_passes == 1]
    fewest = min((way.saved_blocks for way in suited), default=0)
    total = work.model.num_layers + work.model.num_decoder_layers
    if settled is not None or config.memory.weights_in != AUTO:
        count = total if settled is None else settled[1]
        moved = [replace(way, weights_in=home, away_blocks=count) for way in suited]
    else:
        few = (replace(way, weights_in=home, away_blocks=1) for way in suited if way.saved_blocks == fewest)
        moved = [replace(way, away_blocks=count) for way in few if is_worth(way) for count in range(1, total + 1)]
    if not machine.host_bytes:  # it computes in the RAM, which is the budget itself
        return moved
    needs = [pinned_bytes(work, way) + offloaded_bytes(work, way, machine) for way in moved]
    return [way for way, beside in zip(moved, needs, strict=True) if beside <= machine.host_bytes]
