"""A late step does what an early one did, counted in calls of functions and in objects, which no other program
disturbs.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from types import FrameType

import pytest

from memory import controller as controlling
from memory.controller import MemoryController
from tests.end_to_end.running import write_text
from tests.training.small_runs import configuration
from trainer_low_mem import LowMemTrainer

WINDOW = 16  # steps; a multiple of all that comes every few steps, within two light cleanings
# Each stands behind a light cleaning.
EARLY = 51
LATE = 151
SIZES = {
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 16,
    "num_decoder_layers": 1,
    "max_seq_len": 32,
    "effective_batch_size": 1,
    "eval_rows": 2,
    "max_steps": LATE + WINDOW + 2,
    "save_steps": 1000,
    "eval_steps": 1000,
    "log_steps": WINDOW,
    "dropout_rate": 0,
}


class Counter:
    """Counts what the thread that steps calls within the windows, and the objects there are at their beginnings."""

    def __init__(self) -> None:
        self.calls: dict[int, int] = {}
        self.objects: dict[int, int] = {}
        self._window = 0

    def before_step(self, done: int) -> None:
        """Begin or end a window where one begins or ends."""
        if done in (EARLY, LATE):
            gc.collect()
            self._window = done
            self.calls[done] = 0
            self.objects[done] = len(gc.get_objects())
            sys.setprofile(self._count)
        elif done in (EARLY + WINDOW, LATE + WINDOW):
            sys.setprofile(None)

    def _count(self, frame: FrameType, event: str, argument: object) -> None:
        if event in ("call", "c_call"):
            self.calls[self._window] += 1


@pytest.mark.slow
def test_a_late_step_makes_the_calls_of_an_early_one_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_text(tmp_path / "text.txt")
    counter = Counter()
    plain = MemoryController.before_step

    def before_step(controller: MemoryController, done: int, rows: int) -> None:
        counter.before_step(done)
        plain(controller, done, rows)

    monkeypatch.setattr(MemoryController, "before_step", before_step)
    monkeypatch.setattr(controlling, "LOOK_SECONDS", float("inf"))  # by the clock, not by steps
    LowMemTrainer(configuration(tmp_path, "late", **SIZES)).train()
    assert counter.calls[EARLY] > 100 * WINDOW
    assert counter.calls[LATE] < counter.calls[EARLY] + WINDOW, "less than one call a step more"
    assert counter.objects[LATE] - counter.objects[EARLY] < (LATE - EARLY) / 2
