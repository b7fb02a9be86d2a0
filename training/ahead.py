"""What is settled before torch is there? The run's name and right to be, what it goes on from, and its rows.

Rows are prepared in other processes of this run, which take what they need; so this one is small until that is done. A run
of one process begins here from the command line. Several have to agree with each other, and Python may have loaded torch.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from childproc import MEMORY, ChildDied, call
from config import PREFERENCES, Config
from data.sources.places import public_values
from devices import pick
from devices.malloc import tune_malloc
from language import say, speak
from memory.budget import Budget, host_budget
from memory.estimate.workload import BASE_BYTES
from memory.observe.monitor import HostAlone, Monitor
from run_files import RUN_FILE
from settings.errors import DoesNotFit, UserError
from settings.fields import AUTO
from storage import writing
from training.checkpoints.folder import Checkpoints
from training.checkpoints.run_lock import RunLock
from training.checkpoints.runs import check_new_run, check_writable, is_stopped, new_run_name
from training.processes.group import Group
from training.processes.interrupts import interrupt_main_thread
from training.processes.launch import is_alone, local_rank
from training.report.endings import StaysStopped
from training.report.heartbeat import Heartbeat
from training.report.progress import Progress
from training.report.summary import resume_command
from training.report.trackers import tracker_names
from training.start.beginning import Begun, begin
from training.start.resuming import find_run_to_resume, goes_on
from units import format_size

TORCH_ADDRESSES = 900 << 20  # its libraries are mapped whole: 800,000 KiB do not hold them, 1,000,000 do
SURELY_TAKEN = 0.94  # of BASE_BYTES, which differs by some percent from machine to machine


@dataclass
class Watch:
    """What is held for a run from its first moment: its budget, who watches over it, its right to be, its sign of life.

    Args:
        begun: what was settled before torch, when the budget was that of the host; None: nothing.
    """

    budget: Budget
    monitor: Monitor
    lock: RunLock
    sign: Heartbeat
    begun: Begun | None = None


def begin_ahead(config: Config, held: ExitStack) -> Watch | None:
    """Begin a run without torch; None where it has several processes, which begin together.

    Args:
        held: holds the right to write the run, and whoever watches its memory.
    Raises:
        UserError, DoesNotFit: as `settle`.
    """
    if not is_alone():
        return None
    tune_malloc("small")  # until the plan has chosen
    if config.run.device not in (AUTO, "cpu") or config.run.log_with:
        try:
            call(refuse_missing, config)  # before hours of preparing; torch goes with it
        except ChildDied as died:
            if died.reason != MEMORY:
                raise
            raise DoesNotFit(
                say("loading torch was stopped by the system, most likely for lack of memory; free some")
            ) from None
    budget = host_budget(config.memory.memory_budget)
    _refuse_too_small(budget)
    monitor = held.enter_context(Monitor(budget.host_bytes, HostAlone(), config.memory.monitor_seconds))
    watch = Watch(budget, monitor, held.enter_context(RunLock()), held.enter_context(Heartbeat(interrupt_main_thread)))
    return replace(watch, begun=settle(config, watch, Group()))


def _refuse_too_small(budget: Budget) -> None:
    """Find whether the program itself fits, before a limit of the system kills it while torch is loaded.

    Where the user's own figure binds nothing kills, and the plan tells what would fit.

    Raises:
        DoesNotFit: it does not.
    """
    addresses = _address_limit()
    if addresses is not None and addresses < TORCH_ADDRESSES:
        told = (
            "ulimit -v, {size}, does not hold the addresses that torch takes to begin with, about {base}; give it more"
        )
        raise DoesNotFit(say(told, size=format_size(addresses), base=format_size(TORCH_ADDRESSES)))
    if budget.margin_bytes and budget.host_bytes < SURELY_TAKEN * BASE_BYTES:
        told = (
            "--memory_budget = {size}, does not hold the program itself, which takes about {base} ({why}); give it more"
        )
        size, base = format_size(budget.host_bytes), format_size(BASE_BYTES)
        raise DoesNotFit(say(told, size=size, base=base, why=budget.describe()))


def _address_limit() -> int | None:
    with suppress(ImportError):
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        return None if limit == resource.RLIM_INFINITY else limit
    return None


def refuse_missing(config: Config) -> None:
    """Find whether device and trackers are here, as the run itself will; loads torch.

    Raises:
        UserError: they are not.
    """
    speak(config.run.language)  # in a process of its own, too
    pick(config.run.device, local_rank())
    tracker_names(config)


def settle(config: Config, watch: Watch, group: Group) -> Begun:
    """Settle the run's name, whether it may be written, what it goes on from, and prepare its rows.

    Args:
        watch: its lock is acquired where the run is there, and held as long as its context lasts.
        group: the processes of the run.
    Raises:
        UserError: settings or data are wrong, the run is another process's, or it cannot be continued, before anything is written.
        DoesNotFit: preparing was stopped for its memory. StaysStopped: the run was stopped as asked.
    """
    name = group.broadcast(new_run_name(kind_of(config)) if config.run.run_name == AUTO else config.run.run_name)
    refuse(check_writable("log_dir", config.run.log_dir))
    named = Path(config.run.output_dir) / name
    if config.run.run_name != AUTO:
        refuse(group.run_on_main(lambda: watch.lock.acquire(named) if os.path.isfile(named / RUN_FILE) else []))
    with group.first_here():
        resumes = goes_on(config, group.is_first_here)
    config, notes = config.changed(is_keep_training=group.broadcast(resumes)), list[str]()
    if config.train.is_keep_training:
        stopped = group.run_on_main(lambda: found.name if is_stopped(found := find_run_to_resume(config)) else None)
        if stopped is not None:  # which to torchrun was a failure
            told = "{run} was stopped as asked, and its launcher's restart leaves it so; continue with\n  {command}"
            raise StaysStopped(say(told, run=stopped, command=resume_command(config.changed(run_name=stopped))))
        name, notes = group.run_on_main(partial(_reopen, config, watch.lock))
    else:
        config = config.changed(run_name=name)
        refuse(check_new_run(config.run.output_dir, name, config.run.overwrite))
    tell = Progress(1, group.is_main, is_quiet=config.run.quiet).note
    for warning in watch.budget.warnings:
        tell(warning)
    if group.is_main:
        watch.sign.begin(Path(config.run.log_dir, name), partial(_first_facts, config, watch.monitor))
    with watch.monitor.phase("prepare"), group.first_here():
        begun = begin(config, tell)
    begun.notes[:0] = notes
    return begun


def _first_facts(config: Config, monitor: Monitor) -> dict[str, Any]:
    data = config.data
    told = {"kind": kind_of(config), "objective": data.objective, "model": config.model_preset, "data": data.train_file}
    return {
        **public_values(told),
        "budget_bytes": monitor.budget_bytes,
        "peak_bytes": monitor.peak_bytes,
        **monitor.latest(),
    }


def _reopen(config: Config, lock: RunLock) -> tuple[str, list[str]]:
    run_dir = find_run_to_resume(config)
    refuse(lock.acquire(run_dir))
    checkpoints = Checkpoints(run_dir, config.train.keep_latest_n_ckp)
    if checkpoints.folder.is_symlink():
        raise UserError(
            f"--run_name = {run_dir.name}, {checkpoints.folder} is a link, and nothing is written or removed behind one; "
            "put the folder itself there"
        )
    with writing("output_dir", config.run.output_dir):
        return run_dir.name, checkpoints.intact()[1]


def kind_of(config: Config) -> str:
    """The word for such a run: one of `runs.KINDS`."""
    return "dpo" if config.data.objective == PREFERENCES else "finetune" if config.train.is_finetune else "pretrain"


def refuse(problems: list[str]) -> None:
    """Raise all problems together, if there are any."""
    if problems:
        raise UserError(*problems)
