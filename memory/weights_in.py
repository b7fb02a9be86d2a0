"""Where the weights of blocks that do not run may be kept: on the device, in the RAM beside it, or in a file."""

from __future__ import annotations

from pathlib import Path

from language import say
from memory.estimate.disk import is_in_memory
from memory.estimate.workload import DEVICE, FILE, RAM, Machine
from settings.declared import Config
from settings.errors import UserError
from settings.fields import AUTO


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


def weights_in_to_try(config: Config, machine: Machine) -> list[str]:
    """Those of `WEIGHTS_IN` that settings and machine allow, the simplest first."""
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
