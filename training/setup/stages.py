"""A run from its settings to all that its loop needs: six stages, each of which says what it reads and what it gives.

Rows are prepared while this process is small: the first three stages need no torch. Nothing is written for the run
before the last.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from settings.declared import Config
from training.evaluation.scores import OwnMetric
from training.processes.group import Group
from training.report.progress import Progress
from training.setup.base import Start, find_base
from training.setup.data import PreparedData, load_data
from training.setup.identify import Identity, identify
from training.setup.resolved import Beginning, ResolvedRun

if TYPE_CHECKING:
    from devices.base import Device


@dataclass(frozen=True)
class PreparedRun:
    """A run whose rows are prepared: what the stages before torch give."""

    identity: Identity
    start: Start
    data: PreparedData
    metrics: Mapping[str, OwnMetric]


def prepare_run(
    config: Config, resources: ExitStack, group: Group | None = None, metrics: Mapping[str, OwnMetric] | None = None
) -> PreparedRun:
    """Identify the run, find what it starts from, prepare its rows.

    Args:
        resources: closes the run's lock, and whoever watches its memory, when the run ends.
        group: its processes; None: this one alone.
        metrics: the user's own, by name.
    Raises:
        UserError: settings or data are wrong, the run is another process's, or it cannot be continued, before anything
            is written.
        DoesNotFit: preparing was stopped for its memory.
    """
    group = group or Group()
    metrics = metrics or {}
    identity = identify(config, resources, group)
    with identity.monitor.phase("prepare"), group.first_here():
        start = find_base(identity.config, identity.run_dir, identity.resumed_dir, metrics)
        screen = Progress(1, group.is_main, is_quiet=identity.config.run.quiet)
        for text in (*identity.notes, *start.reasons, *start.notes):
            screen.note(text)
        data = load_data(start, identity.resumed_dir, identity.budget.available_bytes)
    return PreparedRun(identity, start, data, metrics)


def set_up(prepared: PreparedRun, group: Group, device: Device) -> ResolvedRun:
    """Settle the machine, choose the plan, and make the run's folder, or reopen it.

    Args:
        group: the processes of the run. device: of this one.
    Raises:
        UserError: the machine cannot follow the settings, or the disk has no room. DoesNotFit: no plan fits the budget.
    """
    # These import torch, which whoever prepares rows has not loaded yet:
    from training.setup.commit import commit
    from training.setup.machine import fit_machine
    from training.setup.plan import choose_plan

    identity = prepared.identity
    start = prepared.start
    data = prepared.data
    monitor = identity.monitor
    config = data.config
    threads, budget, notes = fit_machine(device, config.run, config.memory.memory_budget, group, data.state.step)
    monitor.watch_device(device, budget.device_bytes)
    monitor.watch(budget.host_bytes)
    beginning = Beginning(
        config=config,
        device=device,
        group=group,
        base=start.folder,
        moved_base=start.moved_base,
        is_resumed=start.is_resumed,
        state=data.state,
        tokenizer=data.tokenizer,
    )
    spec, base_bytes = choose_plan(beginning, data, budget, monitor)
    shown_notes = (*identity.notes, *start.reasons, *start.notes)
    run = ResolvedRun(
        **vars(replace(beginning, config=spec.config_with_steps)),
        run_dir=identity.run_dir,
        spec=spec,
        task=data.task,
        prepared=data.prepared,
        loader=data.loader,
        validation=data.validation,
        answers=data.answers,
        metrics=prepared.metrics,
        budget=budget,
        monitor=monitor,
        heartbeat=identity.heartbeat,
        threads=threads,
        base_bytes=base_bytes,
        shown_notes=shown_notes,
        notes=(*data.notes, *(note for note in notes if note not in shown_notes)),
    )
    # A run that goes on lets its data decide again what they teach.
    record = {"objective": start.config.data.objective}
    return replace(run, notes=(*run.notes, *commit(run, identity.lock, record)))
