"""Where the weights of blocks that do not run may be kept: on the device, in the RAM beside it, or in a file."""

from __future__ import annotations

from pathlib import Path

from memory.estimate.disk import is_in_memory
from memory.estimate.workload import DEVICE, FILE, RAM, Machine
from settings.declared import MemoryConfig, RunConfig
from settings.errors import UserError
from settings.fields import AUTO


def weights_folder(memory: MemoryConfig, run: RunConfig) -> Path:
    """The folder for the file of offloaded weights."""
    return Path(run.output_dir if memory.weights_dir == AUTO else memory.weights_dir)


def weights_in_to_try(requested: str, folder: Path, machine: Machine) -> list[str]:
    """Those of `WEIGHTS_IN` that settings and machine allow, the simplest first.

    Args:
        requested: the value of `weights_in`. folder: for the file.
    Raises:
        UserError: a file is asked for, in a folder whose files are in memory.
    """
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
