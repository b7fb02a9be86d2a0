"""Which weight store does a plan ask for, where blocks rest elsewhere? Made from the plan's choice and the device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from devices.base import Device
from engine.homes.places import FileHome, Home, RamHome
from engine.homes.resting import RestingWeightStore
from memory.estimate.homes import SLOTS
from memory.estimate.workload import FILE, ExecutionPlan
from settings.errors import UserError, reason_of
from storage import is_full, make_folder
from units import format_size


def resting_store(
    choice: ExecutionPlan, device: Device, folder: Path, num_processes: int = 1
) -> RestingWeightStore | None:
    """The weight store of blocks that rest in a file or in the RAM beside the device; None where all weights are here.

    Args:
        folder: on whose disk a file lies. num_processes: that train together: then updates come a block later.
    """
    if not choice.away_blocks:
        return None
    is_beside = device.torch_device.type != "cpu" or device.is_separate_memory
    carrier = device.carrier() if is_beside else None

    def home(pieces: Sequence[tuple[int, int]]) -> Home:
        if choice.weights_in != FILE:
            assert carrier is not None, "weights that compute in the RAM rest there without a home"
            return RamHome(pieces, carrier)
        size, largest = sum(pieces[-1]), max(size for _, size in pieces)
        try:
            make_folder(folder)
            return FileHome(folder, size, largest, carrier)
        except OSError as error:
            what = "there is no room" if is_full(error) else reason_of(error)
            raise UserError(
                f"--weights_in = file, {format_size(size)} of weights cannot be put into {folder}: {what}; free space or "
                "name another --weights_dir"
            ) from error

    slots = SLOTS + (num_processes > 1)
    storage, compute = getattr(torch, choice.storage), getattr(torch, choice.compute)
    return RestingWeightStore(storage, compute, choice.away_blocks, home, device.torch_device, carrier, slots)
