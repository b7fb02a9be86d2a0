"""Runs as their files tell of them, made up: what the tests of the page read."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

from board.reader import Folders

BEGAN = 1_790_000_000.0


def folders(folder: Path) -> Folders:
    """The page's three folders, made."""
    page = Folders(folder / "logs", folder / "models", folder / "files")
    for path in (page.log_dir, page.output_dir, page.data_dir):
        path.mkdir(parents=True, exist_ok=True)
    return page


def step(number: int, loss: float | None = 2.0, **more: Any) -> dict[str, Any]:
    """A `step` event."""
    facts = {"learning_rate": 0.01, "tokens": 100, "seconds": 1.0, "tokens_per_second": 100.0, "time": BEGAN + number}
    return {"event": "step", "step": number, "loss": loss, **facts, "memory_bytes": 1000 + number, **more}


def start(max_steps: int = 100) -> dict[str, Any]:
    """A `start` event."""
    settings = {"max_steps": max_steps, "model_preset": "tiny"}
    return {"event": "start", "step": 0, "run_name": "one", "settings": settings}


def write(where: Folders, name: str, *events: dict[str, Any]) -> Path:
    """Write a run's metrics."""
    folder = where.log_dir / name
    folder.mkdir(exist_ok=True)
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf8")
    return path


def beat(where: Folders, name: str, state: str = "running", time: float = BEGAN, **more: Any) -> None:
    """Write a run's sign of life."""
    owner = {"process": os.getpid(), "host": platform.node(), "started": BEGAN, "time": time}
    figures = {"step": 5, "max_steps": 100, "anon_bytes": 1000, "peak_bytes": 1500, "budget_bytes": 4000}
    (where.log_dir / name).mkdir(exist_ok=True)
    record = {"state": state, "reason": "", **owner, **figures, **more}
    (where.log_dir / name / "heartbeat.json").write_text(json.dumps(record), encoding="utf8")
