"""A run as its first three stages leave it, for tests of what comes behind them."""

from __future__ import annotations

import devices
from memory.budget import Budget
from settings.declared import Config
from training.setup.base import find_base
from training.setup.data import load_data
from training.setup.resolved import ResolvedRun

PLENTY = Budget(1 << 40, None, 1 << 40, (), "flag", 0)


def opened(config: Config, **facts: object) -> ResolvedRun:
    """Base and data of a run on the CPU; `facts` are set before."""
    run = ResolvedRun(config)
    run.budget, run.device = PLENTY, devices.pick("cpu")
    for name, value in facts.items():
        setattr(run, name, value)
    find_base(run)
    load_data(run)
    return run
