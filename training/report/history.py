"""The events of a run so far, as columns and as a picture, from its metrics.jsonl, while it runs or after.

Columns are lists of one length, which `pandas.DataFrame` takes; what an event does not hold is None.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from settings.errors import UserError
from settings.program import needs
from support.units import GIB
from training.report.run_files import METRICS_FILE, EventReader

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class FinishedRun(Protocol):
    """What `train` returns."""

    metrics_file: str


def history(run: FinishedRun | str | Path, event: str = "step") -> dict[str, list[Any]]:
    """All events of one kind as columns, by step.

    Args:
        run: what `train` returned, a run's log folder, its metrics.jsonl, or its name under `logs`.
        event: step, eval, memory, cleanup, checkpoint, sample, ...; `docs/notebook.md` lists them.
    Returns:
        name -> values, as many as there were events.
    Raises:
        UserError: there is no such run.
    Memory: the columns; of 100,000 steps about 50 MB.
    """
    source = Path(run) if isinstance(run, (str, Path)) else Path(run.metrics_file)
    files = [path for path in (source, source / METRICS_FILE, Path("logs") / source / METRICS_FILE) if path.is_file()]
    if not files:
        raise UserError(
            "run = {named}, has no {metrics_file}; give a folder under --log_dir, such as logs/my_run",
            named=source,
            metrics_file=METRICS_FILE,
        )
    columns: dict[str, list[Any]] = {}
    count = 0
    for record in EventReader(files[0]).events():
        if record.pop("event") != event:
            continue
        for name in record:
            columns.setdefault(name, [None] * count)
        count += 1
        for name, values in columns.items():
            values.append(record.get(name))
    return columns


def plot(run: FinishedRun | str | Path) -> Figure:
    """Loss, memory against the budget, and speed of a run, by step; a notebook shows it, `savefig` writes it.

    Args:
        run: as for `history`.
    Raises:
        UserError: there is no such run, or matplotlib is not installed.
    """
    needs("matplotlib", "plot")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 7), layout="constrained")
    loss, memory, speed = figure.subplots(3, sharex=True)
    for axes, event, name, label, unit, marker in (
        (loss, "step", "loss", "training", 1, ""),
        (loss, "eval", "loss", "evaluation", 1, "o"),
        (memory, "step", "memory_bytes", "in use", GIB, ""),
        (memory, "step", "peak_bytes", "peak", GIB, ""),
        (speed, "step", "tokens_per_second", "tokens/s", 1, ""),
    ):
        columns = history(run, event)
        if name in columns:  # A value that is no number leaves a gap.
            values = [float("nan") if value is None else value / unit for value in columns[name]]
            axes.plot(columns["step"], values, label=label, marker=marker)
    budgets = [size for size in history(run, "memory").get("budget_bytes", []) if size]
    if budgets:
        memory.axhline(budgets[-1] / GIB, color="black", linestyle="--", label="budget")
    for axes, title in ((loss, "loss"), (memory, "memory, GiB"), (speed, "tokens a second")):
        axes.set_ylabel(title)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
    memory.set_ylim(bottom=0)
    speed.set_xlabel("step")
    return figure
