"""Where the weights of blocks that do not run may be kept: on the device, in the RAM beside it, or in a file."""

from __future__ import annotations

from pathlib import Path

from memory.estimate.disk import is_in_memory
from memory.estimate.workload import DEVICE, FILE, RAM, Machine
from settings.declared import Config
from settings.errors import UserError
from settings.fields import AUTO


def weights_folder(config: Config) -> Path:
    """The folder for the file of offloaded weights."""
    return Path(config.run.output_dir if config.memory.weights_dir == AUTO else config.memory.weights_dir)


def weights_in_to_try(config: Config, machine: Machine) -> list[str]:
    """Those of `WEIGHTS_IN` that settings and machine allow, the simplest first.

    Raises:
        UserError: a file is asked for, in a folder whose files are in memory.
    """
    requested = config.memory.weights_in
    folder = weights_folder(config)
    is_on_disk = machine.is_another or not is_in_memory(folder)
    if requested == FILE and not is_on_disk:
        raise UserError(
            "--weights_in = file, would be in {folder}, whose files are themselves in memory; set --weights_dir "
            "to a folder on a disk",
            folder=folder,
        )
    is_possible = {DEVICE: True, RAM: machine.host_bytes > 0, FILE: is_on_disk}
    allowed = [name for name, possible in is_possible.items() if possible and requested in (AUTO, name)]
    return allowed or [DEVICE]  # Where the device computes in the RAM, its weights are there.
