"""Stage 1: which run this is, and whether it may be written. New or resumed, its name, budget of the host, lock, sign of life."""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from childproc import MEMORY, ChildDied, call
from data.sources.places import public_values
from devices import pick
from devices.malloc import tune_malloc
from language import say, speak
from memory.budget import host_budget
from memory.estimate.workload import BASE_BYTES
from memory.monitor import HostAlone, Monitor
from run_files import RUN_FILE
from settings.declared import Config
from settings.errors import DoesNotFit, UserError, refuse
from settings.fields import AUTO
from storage import writing
from training.checkpoints.folder import Checkpoints
from training.checkpoints.run_lock import RunLock
from training.checkpoints.runs import check_new_run, check_writable, new_run_name, run_of_attempt
from training.processes.group import Group
from training.processes.interrupts import interrupt_main_thread
from training.processes.launch import local_processes, local_rank
from training.report.heartbeat import Heartbeat
from training.report.trackers import tracker_names
from training.setup.hub import check_push
from training.setup.resolved import ResolvedRun
from training.setup.resuming import find_run_to_resume, goes_on, resumed_config, unused_places
from units import format_size

TORCH_ADDRESSES = 900 << 20  # its libraries are mapped whole: 800,000 KiB do not hold them, 1,000,000 do
SURELY_TAKEN = 0.94  # of BASE_BYTES, which differs by some percent from machine to machine


def check_torch_can_load(config: Config) -> None:
    """Find whether torch fits, and whether device and trackers are here, before data is prepared for hours without it.

    Raises:
        DoesNotFit: the system would stop the process while torch is loaded. UserError: device or tracker is not here.
    """
    tune_malloc("small")  # until the plan has chosen
    if config.run.device not in (AUTO, "cpu") or config.run.log_with:
        try:
            call(_load_device_and_trackers, config)  # torch goes with the child
        except ChildDied as died:
            if died.reason != MEMORY:
                raise
            raise DoesNotFit(
                say("the system stopped the import of torch, most likely for lack of memory; free some memory")
            ) from None
    budget, addresses = host_budget(config.memory.memory_budget), _address_limit()
    if addresses is not None and addresses < TORCH_ADDRESSES:
        told = "ulimit -v, {size}, does not hold the addresses that torch reserves at start, about {base}; raise it"
        raise DoesNotFit(say(told, size=format_size(addresses), base=format_size(TORCH_ADDRESSES)))
    # where the user's own figure binds nothing kills, and the plan tells what would fit
    if budget.margin_bytes and budget.host_bytes < SURELY_TAKEN * BASE_BYTES:
        told = "--memory_budget = {size}, does not hold the program itself, which takes about {base} ({why}); raise it"
        size, base = format_size(budget.host_bytes), format_size(BASE_BYTES)
        raise DoesNotFit(say(told, size=size, base=base, why=budget.describe()))


def _load_device_and_trackers(config: Config) -> None:
    speak(config.run.language)  # in a process of its own, too
    pick(config.run.device, local_rank(), local_processes())
    tracker_names(config.run.log_with)


def _address_limit() -> int | None:
    with suppress(ImportError):
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        return None if limit == resource.RLIM_INFINITY else limit
    return None


def identify(config: Config, held: ExitStack, group: Group) -> ResolvedRun:
    """Decide the run's name and whether it goes on from a saved one; take its lock, and watch its memory from here on.

    Args:
        held: holds lock, monitor and sign of life until the run ends.
    Raises:
        UserError: the run is another process's, or there is none to resume.
    """
    run = ResolvedRun(config, group)
    run.budget = host_budget(config.memory.memory_budget, local_processes())
    run.monitor = held.enter_context(Monitor(run.budget.host_bytes, HostAlone()))
    run.lock = held.enter_context(RunLock())
    run.heartbeat = held.enter_context(Heartbeat(interrupt_main_thread))
    earlier = group.first_of(run_of_attempt(config.run.output_dir, config.run.run_name))
    requested = config.run.run_name if earlier is None else earlier
    kind = config.task.run_kind(config.train.is_finetune)
    name = group.broadcast(new_run_name(kind) if requested == AUTO else requested)
    refuse(check_writable("log_dir", config.run.log_dir))
    named = Path(config.run.output_dir) / name
    if requested != AUTO:
        refuse(group.run_on_main(lambda: run.lock.acquire(named) if os.path.isfile(named / RUN_FILE) else []))
    if earlier is not None or group.broadcast(goes_on(config)):
        name, run.notes = group.run_on_main(partial(_lock_and_clean, config, requested, run.lock))
        run.resumed_dir = Path(config.run.output_dir) / name
        run.config = resumed_config(config, run.resumed_dir)
        run.notes += unused_places(config, run.resumed_dir)
    else:
        run.config = config.changed(run_name=name, is_keep_training=False)
        refuse(check_new_run(config.run.output_dir, name, config.run.overwrite))
    if (repository := run.config.run.push_to_hub) is not None:
        group.run_on_main(lambda: check_push(repository))
    run.told += run.budget.warnings
    if group.is_main:
        run.heartbeat.begin(Path(config.run.log_dir, name), partial(_first_facts, run.config, run.monitor))
    return run


def _lock_and_clean(config: Config, run_name: str, lock: RunLock) -> tuple[str, list[str]]:
    run_dir = find_run_to_resume(config.run.output_dir, run_name)
    refuse(lock.acquire(run_dir))
    checkpoints = Checkpoints(run_dir, config.train.keep_latest_n_ckp)
    if checkpoints.folder.is_symlink():
        raise UserError(
            "--run_name = {name}, {folder} is a link, and nothing is written or removed behind one; put the "
            "folder itself there",
            name=run_dir.name,
            folder=checkpoints.folder,
        )
    with writing("output_dir", config.run.output_dir):
        return run_dir.name, checkpoints.intact()[1]


def _first_facts(config: Config, monitor: Monitor) -> dict[str, Any]:
    data = config.data
    told = {
        "kind": config.task.run_kind(config.train.is_finetune), "objective": data.objective,
        "model": config.model_preset, "data": data.train_file,
    }  # fmt: skip
    return {
        **public_values(told),
        "budget_bytes": monitor.budget_bytes,
        "peak_bytes": monitor.peak_bytes,
        **monitor.latest(),
    }
