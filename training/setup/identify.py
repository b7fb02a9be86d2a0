"""Stage 1: which run this is, and whether it may be written. New or resumed, its name, budget of the host, lock, sign
of life.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from common.child_process import MEMORY, ChildDied, call
from common.language import say, speak
from common.storage import writing
from common.units import format_size
from data.sources.places import public_values
from devices import pick
from devices.malloc import tune_malloc
from memory.budget import Budget, host_budget
from memory.estimate.workload import BASE_BYTES
from memory.monitor import HostAlone, Monitor
from settings.declared import Config, RunConfig
from settings.errors import DoesNotFit, UserError, refuse
from settings.fields import AUTO
from training.checkpoints.folder import Checkpoints
from training.checkpoints.run_lock import RunLock
from training.checkpoints.runs import check_new_run, check_writable, new_run_name, run_of_attempt
from training.processes.group import Group
from training.processes.interrupts import interrupt_main_thread
from training.processes.launch import local_processes, local_rank
from training.report.heartbeat import Heartbeat
from training.report.run_files import RUN_FILE
from training.report.trackers import tracker_names
from training.setup.hub import check_push
from training.setup.resuming import find_run_to_resume, goes_on, resumed_config, unused_places

TORCH_ADDRESSES = 900 << 20  # its libraries are mapped whole: 800,000 KiB do not hold them, 1,000,000 do
SURELY_TAKEN = 0.94  # of BASE_BYTES, which differs by some percent from machine to machine


def check_torch_can_load(run: RunConfig, memory_budget: int | str) -> None:
    """Find whether torch fits, and whether device and trackers are here, before data is prepared for hours without it.

    Raises:
        DoesNotFit: the system would stop the process while torch is loaded. UserError: device or tracker is not here.
    """
    tune_malloc("small")  # until the plan has chosen
    if run.device not in (AUTO, "cpu") or run.log_with:
        try:
            call(_load_device_and_trackers, run)  # torch goes with the child
        except ChildDied as died:
            if died.reason != MEMORY:
                raise
            raise DoesNotFit(
                say("the system stopped the import of torch, most likely for lack of memory; free some memory")
            ) from None
    budget = host_budget(memory_budget)
    addresses = _address_limit()
    if addresses is not None and addresses < TORCH_ADDRESSES:
        raise DoesNotFit(
            "ulimit -v, {size}, does not hold the addresses that torch reserves at start, about {base}; raise it",
            size=format_size(addresses),
            base=format_size(TORCH_ADDRESSES),
        )
    # Where the user's own figure binds, nothing kills, and the plan tells what would fit.
    if budget.margin_bytes and budget.host_bytes < SURELY_TAKEN * BASE_BYTES:
        raise DoesNotFit(
            "--memory_budget = {size}, does not hold the program itself, which takes about {base} ({why}); raise it",
            size=format_size(budget.host_bytes),
            base=format_size(BASE_BYTES),
            why=budget.describe(),
        )


def _load_device_and_trackers(run: RunConfig) -> None:
    speak(run.language)  # in a process of its own, too
    pick(run.device, local_rank(), local_processes())
    tracker_names(run.log_with)


def _address_limit() -> int | None:
    with suppress(ImportError):
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        return None if limit == resource.RLIM_INFINITY else limit
    return None


@dataclass(frozen=True)
class Identity:
    """Which run this start trains.

    Args:
        config: the settings of this start; of a run that goes on those that it has saved, with the flags of this start
            over them.
        run_dir: folder of the run, which need not be there yet.
        resumed_dir: the same for a run that goes on; None: a new run.
        budget: of the host's memory.
        monitor, lock, heartbeat: they last until the run ends.
        notes: warnings, shown when the log is open.
    """

    config: Config
    run_dir: Path
    resumed_dir: Path | None
    budget: Budget
    monitor: Monitor
    lock: RunLock
    heartbeat: Heartbeat
    notes: list[str]


def identify(config: Config, held: ExitStack, group: Group) -> Identity:
    """Decide the run's name and whether it goes on from a saved one; take its lock, and watch its memory from here on.

    Args:
        held: holds lock, monitor and sign of life until the run ends.
    Raises:
        UserError: the run is another process's, or there is none to resume.
    """
    budget = host_budget(config.memory.memory_budget, local_processes())
    monitor = held.enter_context(Monitor(budget.host_bytes, HostAlone()))
    lock = held.enter_context(RunLock())
    heartbeat = held.enter_context(Heartbeat(interrupt_main_thread))
    output_dir = Path(config.run.output_dir)
    earlier = group.first_of(run_of_attempt(output_dir, config.run.run_name))
    requested = config.run.run_name if earlier is None else earlier
    kind = config.task.run_kind(config.train.is_finetune)
    name = group.broadcast(new_run_name(kind) if requested == AUTO else requested)
    refuse(check_writable("log_dir", config.run.log_dir))
    named = output_dir / name
    refuse(group.run_on_main(lambda: lock.acquire(named) if os.path.isfile(named / RUN_FILE) else []))
    if earlier is not None or group.broadcast(goes_on(config.run, config.train.is_keep_training)):
        keep_latest = config.train.keep_latest_n_ckp
        run_dir, damages = group.run_on_main(partial(lock_and_clean, output_dir, requested, keep_latest, lock))
        settings = resumed_config(config, run_dir)
        resumed_dir = run_dir
        notes = [*damages, *unused_places(config.as_dict(), config.given, run_dir)]
    else:
        refuse(check_new_run(output_dir, name, config.run.overwrite))
        run_dir = named
        settings = config
        resumed_dir = None
        notes = []
    if settings.run.push_to_hub is not None:
        group.run_on_main(partial(check_push, settings.run.push_to_hub))
    if group.is_main:
        facts = {
            "kind": settings.task.run_kind(settings.train.is_finetune),
            "objective": settings.data.objective,
            "model": settings.model_preset,
            "data": settings.data.train_file,
        }
        heartbeat.begin(Path(settings.run.log_dir, run_dir.name), partial(_first_facts, public_values(facts), monitor))
    return Identity(settings, run_dir, resumed_dir, budget, monitor, lock, heartbeat, notes)


def lock_and_clean(output_dir: Path, run_name: str, keep_latest: int, lock: RunLock) -> tuple[Path, list[str]]:
    """Take the lock of the run that goes on, and set aside what a killed process has left of its checkpoints.

    Args:
        run_name: as this start gives it; auto: the newest run.
    Returns:
        its folder, and a warning for each checkpoint that is damaged.
    Raises:
        UserError: there is no such run, or it is another process's, or its checkpoints lie behind a link.
    """
    run_dir = find_run_to_resume(output_dir, run_name)
    refuse(lock.acquire(run_dir))
    checkpoints = Checkpoints(run_dir, keep_latest)
    if checkpoints.folder.is_symlink():
        raise UserError(
            "--run_name = {name}, {folder} is a link, and nothing is written or removed behind one; put the "
            "folder itself there",
            name=run_dir.name,
            folder=checkpoints.folder,
        )
    with writing("output_dir", output_dir):
        return run_dir, checkpoints.intact()[1]


def _first_facts(facts: Mapping[str, Any], monitor: Monitor) -> dict[str, Any]:
    return {**facts, "budget_bytes": monitor.budget_bytes, "peak_bytes": monitor.peak_bytes, **monitor.latest()}
