"""Rows are prepared while no process of a run has torch: whoever imports it here ends at once, with an exit code of its
own.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.running import ENVIRONMENT, Place, Run
from tests.end_to_end.world import SHAPE, World

REACHED = 77


@pytest.fixture
def alone(world: World, tmp_path: Path) -> Place:
    """Empty folders, and a cache in which nothing is prepared."""
    (tmp_path / "stub" / "torch").mkdir(parents=True)
    (tmp_path / "stub" / "torch" / "__init__.py").write_text(f"raise SystemExit({REACHED})\n")
    return Place(tmp_path, tmp_path / "cache")


def until_torch(place: Place, name: str, *flags: str) -> Run:
    """Run a command until a process of it, whichever, imports torch."""
    return subprocess.run(
        [sys.executable, *place.command(name, *flags)],
        cwd=place.folder,
        capture_output=True,
        text=True,
        env={**ENVIRONMENT, "PYTHONPATH": str(place.folder / "stub")},
    )


def prepared(place: Place) -> list[Path]:
    return list(place.cache.glob("shards-*/manifest.json"))


def test_a_tokenizer_is_trained_and_text_prepared_before_torch(alone: Place, world: World) -> None:
    done = until_torch(alone, "train", f"--train_file={world.text}", *SHAPE, "--max_seq_len=64")
    assert done.returncode == REACHED, done.stderr
    assert len(prepared(alone)) == 1 and list(alone.cache.glob("tokenizer-*"))
    assert not alone.runs.exists(), "a run's folder comes with its plan"


def test_a_plan_needs_no_torch_at_all(alone: Place, pretrained: World) -> None:
    base = f"--finetune_from={pretrained.place.runs / 'whole'}"
    plan = ("--is_finetune=True", base, f"--train_file={pretrained.pairs}", "--memory_budget=2G")
    done = until_torch(alone, "plan", *plan)
    assert done.returncode == 0 and "starting from" in done.stdout
