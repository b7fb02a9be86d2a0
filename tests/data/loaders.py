"""Settings, shards and loaders of small files, for fixtures that many tests share."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from data.batches.loader import StepLoader
from settings.declared import Config
from settings.loading import load


def loader_of(split_dir: Path, objective: str, config: Config, ultra_low_mem: bool = False) -> StepLoader:
    return StepLoader(split_dir, objective, config.data, config.model, config.run.seed, ultra_low_mem)


def small_config(folder: Path, **flags: Any) -> Config:
    """Settings that keep everything in a folder and need no tokenizer to be trained."""
    defaults = {"tokenizer_type": "byte", "max_seq_len": 64, "cache_dir": folder / "cache", "prepare_workers": 0}
    return load("train", {name: str(value) for name, value in {**defaults, **flags}.items()})


def write_rows(path: Path, rows: Iterable[Mapping[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf8")
    return path
