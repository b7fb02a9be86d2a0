"""How do the processes of a run agree? Sums, and the main process's word for all."""

from __future__ import annotations

from typing import TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

Value = TypeVar("Value")


def sum_over(accelerator: Accelerator, *numbers: float) -> list[float]:
    """Sum each number over all processes, in float64 where the device has it: one process and two shall agree."""
    if accelerator.num_processes == 1:
        return list(numbers)
    dtype = torch.float32 if accelerator.device.type == "mps" else torch.float64
    total = torch.tensor(numbers, dtype=dtype, device=accelerator.device)
    return accelerator.reduce(total, reduction="sum").tolist()  # type: ignore[no-any-return, union-attr]


def agree_on(accelerator: Accelerator, value: Value) -> Value:
    """The main process's value, on all processes."""
    return broadcast_object_list([value])[0] if accelerator.num_processes > 1 else value  # type: ignore[no-any-return]
