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

from data.sources.places import public_values
from devices import pick
from devices.malloc import tune_malloc
from memory.budget import Budget, host_budget
from memory.estimate.workload import BASE_BYTES
from memory.monitor import HostAlone, Monitor
from settings.declared import Config, RunConfig
from settings.errors import DoesNotFit, UserError, refuse
from settings.fields import AUTO
from support.child_process import MEMORY, ChildDied, call
from support.language import say, speak
from support.storage import writing
from support.units import format_size
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
from training.setup.resuming import resumed_config, run_to_resume, unused_places

# The libraries of torch are mapped whole: 800,000 KiB of addresses do not hold them, 1,000,000 do.
TORCH_ADDRESSES = 900 << 20
SURELY_TAKEN = 0.94  # The part of BASE_BYTES that is taken on every machine: they differ by some percent.


def check_torch_can_load(run: RunConfig, memory_budget: int | str) -> None:
    """Find whether torch fits, and whether device and trackers are here, before data is prepared for hours without it.

    Raises:
        DoesNotFit: the system would stop the process while torch is loaded. UserError: device or tracker is not here.
    """
    tune_malloc("small")  # The plan chooses later.
    if run.device not in (AUTO, "cpu") or run.log_with:
        try:
            call(_load_device_and_trackers, run)  # Torch goes with the child.
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
            "ulimit -v, {size}, is less than the address space that torch reserves at start, about {base}; raise it",
            size=format_size(addresses),
            base=format_size(TORCH_ADDRESSES),
        )
    # Where the user's own figure binds, nothing kills, and the plan tells what would fit.
    if budget.margin_bytes and budget.host_bytes < SURELY_TAKEN * BASE_BYTES:
        raise DoesNotFit(
            "--memory_budget = {size}, is too small for the program itself, which takes about {base} ({why}); raise it",
            size=format_size(budget.host_bytes),
            base=format_size(BASE_BYTES),
            why=budget.describe(),
        )


def _load_device_and_trackers(run: RunConfig) -> None:
    speak(run.language)
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
        is_resumed: whether the run goes on.
        budget: of the host's memory.
        monitor, lock, heartbeat: they last until the run ends.
        notes: warnings to show.
    """

    config: Config
    run_dir: Path
    is_resumed: bool
    budget: Budget
    monitor: Monitor
    lock: RunLock
    heartbeat: Heartbeat
    notes: list[str]

    @property
    def resumed_dir(self) -> Path | None:
        """The folder of a run that goes on; None: a new run."""
        return self.run_dir if self.is_resumed else None


def identify(config: Config, resources: ExitStack, group: Group) -> Identity:
    """Decide the run's name and whether it goes on from a saved one; take its lock, and watch its memory from here on.

    Args:
        resources: closes lock, monitor and sign of life when the run ends.
    Raises:
        UserError: the run is another process's, or there is none to resume.
    """
    budget = host_budget(config.memory.memory_budget, local_processes())
    monitor = resources.enter_context(Monitor(budget.host_bytes, HostAlone()))
    lock = resources.enter_context(RunLock())
    heartbeat = resources.enter_context(Heartbeat(interrupt_main_thread))
    refuse(check_writable("log_dir", config.run.log_dir))
    attempted = group.first_of(run_of_attempt(config.run.output_dir, config.run.run_name))
    run_dir, is_resumed, notes = group.run_on_main(partial(claim_run, config, attempted, lock))
    settings = config
    notes = [*budget.warnings, *notes]
    if is_resumed:
        settings = resumed_config(config, run_dir)
        notes += unused_places(config.as_dict(), config.is_set, run_dir)
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
    return Identity(settings, run_dir, is_resumed, budget, monitor, lock, heartbeat, notes)


def claim_run(config: Config, attempted: str | None, lock: RunLock) -> tuple[Path, bool, list[str]]:
    """Choose the run of this start and lock it; of one that goes on, set aside what a killed process has left.

    Args:
        attempted: the run of an earlier attempt of this launch; None: there was none.
    Returns:
        its folder, whether it goes on, and a warning for each checkpoint that is damaged.
    Raises:
        UserError: it cannot be resumed, or not be made, or is another process's, or its checkpoints lie behind a link.
    """
    output_dir = Path(config.run.output_dir)
    run_dir = run_to_resume(config.run, config.train.is_keep_training, attempted)
    if run_dir is None:
        name = config.run.run_name
        if name == AUTO:
            name = new_run_name(config.task.run_kind(config.train.is_finetune))
        run_dir = output_dir / name
        # The folder of a name that is new is locked when it is made.
        if os.path.isfile(run_dir / RUN_FILE):
            refuse(lock.acquire(run_dir))
        refuse(check_new_run(output_dir, name, config.run.overwrite))
        return run_dir, False, []
    refuse(lock.acquire(run_dir))
    checkpoints = Checkpoints(run_dir, config.train.keep_latest_n_ckp)
    if checkpoints.folder.is_symlink():
        raise UserError(
            "--run_name = {name}, {folder} is a link, and nothing is written or removed behind one; put the "
            "folder itself there",
            name=run_dir.name,
            folder=checkpoints.folder,
        )
    with writing("output_dir", output_dir):
        return run_dir, True, checkpoints.intact()[1]


def _first_facts(facts: Mapping[str, Any], monitor: Monitor) -> dict[str, Any]:
    return {**facts, "budget_bytes": monitor.budget_bytes, "peak_bytes": monitor.peak_bytes, **monitor.latest()}
