"""What the tests of commands share: settings by flags, files of rows, and small models."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from settings.declared import Config
from settings.loading import load
from tests.training.small_trained import SHAPE, save_trained


def flags_of(command: str, **flags: Any) -> Config:
    """The settings of a command with these flags, whatever type their values have."""
    return load(command, {name: str(value) for name, value in flags.items()})


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    """Write JSON lines."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf8")
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf8").split("\n") if line]


def encoder(folder: Path, **shape: Any) -> Path:
    """A small encoder, by default without a head."""
    return save_trained(folder / "encoder", shape=replace(SHAPE, **{"num_decoder_layers": 0, "head": "none", **shape}))
