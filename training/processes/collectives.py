"""How do the processes of a run agree? Sums, the least of all, and the main process's word for all."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import cache
from typing import TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import broadcast_object_list, gather_object

from settings.errors import UserError
from training.processes.alone import Alone

Value = TypeVar("Value")
# A failure is found by `training.processes.peers` in seconds; so this only has to be longer than preparing and saving ever take.
PATIENCE = timedelta(hours=12)


def group_settings() -> InitProcessGroupKwargs:
    """For `Accelerator(kwargs_handlers=[...])`: a process group that waits for whoever prepares data or saves."""
    return InitProcessGroupKwargs(timeout=PATIENCE)


def group_of_hosts(accelerator: Accelerator) -> dist.ProcessGroup | None:
    """The processes as a group that tensors of the host go over, so that no GPU is waited for; None: the default one is.

    All processes must ask together for the first time.
    """
    if accelerator.num_processes == 1 or accelerator.device.type == "cpu":
        return None
    return _hosts_of(dist.group.WORLD)


@cache
def _hosts_of(world: dist.ProcessGroup) -> dist.ProcessGroup:
    return dist.new_group(timeout=PATIENCE, backend="gloo")


def sum_over(accelerator: Accelerator, *numbers: float) -> list[float]:
    """Sum each number over all processes, in float64: one process and two shall agree."""
    if accelerator.num_processes == 1:
        return list(numbers)
    if (hosts := group_of_hosts(accelerator)) is not None:
        told = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(told, group=hosts)
        return told.tolist()  # type: ignore[no-any-return]
    return accelerator.reduce(_as_tensor(accelerator, numbers), reduction="sum").tolist()  # type: ignore[no-any-return, union-attr]


def least_of(accelerator: Accelerator, *numbers: float) -> list[float]:
    """The least of each number over all processes: budgets are measured at different times, and machines differ."""
    return [-number for number in most_of(accelerator, *(-number for number in numbers))]


def most_of(accelerator: Accelerator, *numbers: float) -> list[float]:
    """The largest of each number over all processes."""
    if accelerator.num_processes == 1:
        return list(numbers)
    everyone = accelerator.gather(_as_tensor(accelerator, numbers).unsqueeze(0))
    return everyone.amax(0).tolist()  # type: ignore[no-any-return, union-attr]


def agree_on(accelerator: Accelerator, value: Value) -> Value:
    """The main process's value, on all processes."""
    return broadcast_object_list([value])[0] if accelerator.num_processes > 1 else value  # type: ignore[no-any-return]


def first_told(accelerator: Accelerator, value: Value | None) -> Value | None:
    """The value of the first process that has one."""
    told = gather_object([value]) if accelerator.num_processes > 1 else [value]
    return next((each for each in told if each is not None), None)


def by_main(accelerator: Accelerator, work: Callable[[], Value]) -> Value:
    """What the main process alone finds out, on all processes; what it refuses, all refuse.

    Raises:
        UserError: `work` did.
    """
    found: tuple[Value | None, list[str]] = (None, [])
    if accelerator.is_main_process:
        try:
            found = work(), []
        except UserError as error:
            found = None, error.problems
    result, problems = agree_on(accelerator, found)
    if problems:
        raise UserError(*problems)
    return result  # type: ignore[return-value]


class Together(Alone):
    """All processes of a run, which settle together how it begins."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self.is_main, self.is_first_here = accelerator.is_main_process, accelerator.is_local_main_process

    def agree_on(self, value: Value) -> Value:
        return agree_on(self._accelerator, value)

    def by_main(self, work: Callable[[], Value]) -> Value:
        return by_main(self._accelerator, work)

    def first_here(self) -> AbstractContextManager[object]:
        return self._accelerator.local_main_process_first()  # type: ignore[no-any-return]


def _as_tensor(accelerator: Accelerator, numbers: tuple[float, ...]) -> torch.Tensor:
    dtype = torch.float32 if accelerator.device.type == "mps" else torch.float64
    return torch.tensor(numbers, dtype=dtype, device=accelerator.device)
