"""Stage 4: the device of a run, and the memory that it may take there and on its host; the least of all its
processes.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from devices import processor
from devices.base import Device
from devices.choose import passed_over
from devices.kernels.calls import kernels, use
from devices.threads import Threads, use_threads
from memory.budget import Budget, measure_budget
from settings.declared import RunConfig
from settings.errors import UserError
from support.language import say
from training.processes.group import Group
from training.processes.launch import OWN_STORES, local_processes, meets_where_the_last_met


def fit_machine(
    device: Device, run: RunConfig, memory_budget: int | str, group: Group, step: int
) -> tuple[Threads, Budget, list[str]]:
    """Settle threads, kernels and budget.

    Args:
        step: so many are done, as this process has read it.
    Returns:
        the threads; the budget on the device and its host, the least of all processes; and what is to be told.
    Raises:
        UserError: the machines of the run hold different checkpoints.
    """
    threads = use_threads(run.num_threads, local_processes())
    # All processes use compiled kernels or none does: weights that all update alike must stay the same bits.
    use(run.compiled_kernels is not False)
    use(bool(group.all_reduce_min(float(kernels() is not None))[0]))
    budget = measure_budget(memory_budget, device, local_processes())
    # Processes measure at different times, and machines differ.
    sizes = (budget.host_bytes, budget.device_bytes or 0, installed_bytes(budget))
    host, on_device, installed = (int(size) for size in group.all_reduce_min(*map(float, sizes)))
    budget = replace(budget, host_bytes=host, installed_bytes=installed)
    if budget.device_bytes is not None:
        budget = replace(budget, device_bytes=on_device)
    if len(set(group.gather(step))) > 1:
        raise UserError(
            "--output_dir = {output_dir}, the machines of this run hold checkpoints of different steps; name a "
            "folder that all see",
            output_dir=run.output_dir,
        )
    notes = [*budget.warnings, *passed_over(run.device, device), *unlike_processors(device, group)]
    if meets_where_the_last_met():
        remark = (
            "a restart by torchrun may hang: its processes would meet at stale addresses of the previous attempt; "
            "export {name}=1 first"
        )
        notes.append(say(remark, name=OWN_STORES))
    return threads, budget, notes


def installed_bytes(budget: Budget) -> int:
    """RAM of the machine; where the system does not tell it, what is free."""
    return budget.available_bytes if budget.installed_bytes is None else budget.installed_bytes


def unlike_processors(device: Device, group: Group) -> list[str]:
    """That the processes compute in other last places, where their processors are not alike: each updates its own
    weights.
    """
    here = f"{processor.here().name} {torch.backends.cpu.get_cpu_capability()}"
    if device.name != "cpu" or len(set(group.gather(here))) == 1:
        return []
    text = (
        "the machines of this run have different processors, whose results differ in the last digits: the weights "
        "of the processes drift apart slowly, and those of the first are saved; set ATEN_CPU_CAPABILITY=avx2 on "
        "all machines to make them agree"
    )
    return [say(text)]
