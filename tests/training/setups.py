"""Runs as their first stages leave them, for tests of what comes behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import devices
from memory.budget import Budget
from memory.estimate.workload import ExecutionPlan
from settings.declared import Config
from training.setup.base import Start, find_base
from training.setup.data import PreparedData, load_data
from training.setup.resolved import Beginning, ResolvedRun
from training.setup.resolving import RunSpec
from training.setup.schedules import Steps

PLENTY = Budget(1 << 40, None, 1 << 40, (), "flag", 0)


def started(config: Config, resumed_dir: Path | None = None) -> Start:
    """What a run starts from."""
    return find_base(config, Path(config.run.output_dir, config.run.run_name), resumed_dir)


def opened(config: Config) -> tuple[Beginning, PreparedData]:
    """Base and data of a new run on the CPU."""
    start = started(config)
    data = load_data(start, None, PLENTY.available_bytes)
    beginning = Beginning(
        config=data.config, device=devices.pick("cpu"), base=start.folder, state=data.state, tokenizer=data.tokenizer
    )
    return beginning, data


def resolved(config: Config, choice: ExecutionPlan, rows: int) -> ResolvedRun:
    """A new run on the CPU whose steps have so many rows and are done in this way."""
    beginning, data = opened(config)
    ours = beginning.config
    plan: Any = type("Plan", (), {"choice": choice})
    steps = Steps.of(ours.train, ours.model, ours.lora, data.task, rows, data.loader.num_rows)
    nothing: Any = None
    return ResolvedRun(
        **vars(beginning),
        run_dir=Path(ours.run.output_dir, ours.run.run_name),
        spec=RunSpec(ours, nothing, nothing, plan, steps),
        task=data.task,
        prepared=data.prepared,
        loader=data.loader,
        validation=data.validation,
        answers=data.answers,
        metrics={},
        budget=PLENTY,
        monitor=nothing,
        heartbeat=nothing,
        threads=nothing,
        base_bytes=0,
        shown_notes=(),
        notes=(),
    )
