"""Stage 4: the device of a run, and the memory that it may take there and on its host; the least of all its processes."""

from __future__ import annotations

from dataclasses import replace

import torch

from devices import processor
from devices.base import Device
from devices.choose import passed_over
from devices.kernels.calls import kernels, use
from devices.threads import use_threads
from language import say
from memory.budget import measure_budget
from settings.errors import UserError
from training.processes.group import Group
from training.processes.launch import OWN_STORES, local_processes, meets_where_the_last_met
from training.setup.resolved import ResolvedRun


def fit_machine(run: ResolvedRun, device: Device) -> None:
    """Settle device, threads, kernels and budget.

    Raises:
        UserError: the machines of the run hold different checkpoints.
    """
    config, group, run.device = run.config, run.group, device
    run.threads = use_threads(config.run.num_threads, local_processes())
    # all processes use compiled kernels or none does: weights that all update alike must stay the same bits
    use(config.run.compiled_kernels is not False)
    use(bool(group.all_reduce_min(float(kernels() is not None))[0]))
    known = run.budget.warnings
    budget = measure_budget(config.memory.memory_budget, device, local_processes())
    # processes measure at different times, and machines differ
    installed = budget.available_bytes if budget.installed_bytes is None else budget.installed_bytes
    sizes = (budget.host_bytes, budget.device_bytes or 0, installed)
    host, most, installed = (int(size) for size in group.all_reduce_min(*map(float, sizes)))
    on_device = None if budget.device_bytes is None else most
    run.budget = replace(budget, host_bytes=host, device_bytes=on_device, installed_bytes=installed)
    run.monitor.watch_device(device, on_device)
    run.monitor.watch(run.budget.host_bytes)
    run.notes += [warning for warning in budget.warnings if warning not in known]
    if len(set(group.gather(run.state.step))) > 1:
        raise UserError(
            "--output_dir = {output_dir}, the machines of this run hold checkpoints of different steps; name a "
            "folder that all see",
            output_dir=config.run.output_dir,
        )
    run.notes += [*passed_over(config.run.device, device), *unlike_processors(device, group)]
    if meets_where_the_last_met():
        remark = (
            "a restart by torchrun may hang: its processes would meet at stale addresses of the previous attempt; "
            "export {name}=1 first"
        )
        run.notes.append(say(remark, name=OWN_STORES))


def unlike_processors(device: Device, group: Group) -> list[str]:
    """That the processes compute in other last places, where their processors are not alike: each updates its own weights."""
    here = f"{processor.here().name} {torch.backends.cpu.get_cpu_capability()}"
    if device.name != "cpu" or len(set(group.gather(here))) == 1:
        return []
    told = (
        "the machines of this run have different processors, whose results differ in the last digits: the weights "
        "of the processes drift apart slowly, and those of the first are saved; set ATEN_CPU_CAPABILITY=avx2 on "
        "all machines to make them agree"
    )
    return [say(told)]
