"""A loader by the settings of a run."""

from __future__ import annotations

from pathlib import Path

from data.batches.loader import StepLoader
from settings.declared import Config


def loader_of(split_dir: Path, objective: str, config: Config, ultra_low_mem: bool = False) -> StepLoader:
    return StepLoader(split_dir, objective, config.data, config.model, config.run.seed, ultra_low_mem)
