"""The stages that need no torch, one after the other. Rows are prepared while this process is small."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack

from settings.declared import Config
from training.evaluation.scores import OwnMetric
from training.processes.group import Group
from training.report.progress import Progress
from training.setup.base import find_base
from training.setup.data import load_data
from training.setup.identify import identify
from training.setup.resolved import ResolvedRun


def stages_before_torch(
    config: Config, held: ExitStack, group: Group | None = None, metrics: Mapping[str, OwnMetric] | None = None
) -> ResolvedRun:
    """Identify the run, find what it starts from, prepare its rows.

    Args:
        held: holds the run's lock, and whoever watches its memory. group: its processes; None: this one alone.
        metrics: the user's own, by name.
    Raises:
        UserError: settings or data are wrong, the run is another process's, or it cannot be continued, before anything is written.
        DoesNotFit: preparing was stopped for its memory.
    """
    run = identify(config, held, group or Group())
    run.metrics = metrics or {}
    with run.monitor.phase("prepare"), run.group.first_here():
        find_base(run)
        for text in run.told:
            Progress(1, run.group.is_main, is_quiet=run.config.run.quiet).note(text)
        load_data(run)
    return run
