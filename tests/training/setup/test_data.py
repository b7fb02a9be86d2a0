"""A run that goes on over other rows says so, and compares no number with one that was measured on others."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tests.end_to_end.running import write_text
from tests.training.small_runs import configuration
from trainer_low_mem import LowMemTrainer


def test_a_run_that_goes_on_knows_its_rows(tmp_path: Path) -> None:
    """Wherever they lie, and whenever they were prepared."""
    text = tmp_path / "text.txt"
    write_text(text)
    LowMemTrainer(configuration(tmp_path, "r", max_steps=2, eval_steps=1, eval_rows=2)).train()
    os.utime(text, (0, 0))
    shutil.rmtree(tmp_path / "cache")
    more = LowMemTrainer(configuration(tmp_path, "r", is_keep_training=True, max_steps=3, eval_rows=16))
    more.train()
    (note,) = [note for note in more.live.run.notes if "reset" in note]
    assert "it was measured on 2 rows" in note, "the same data"
    assert more.live.best.step == more.live.state.step == 3, "the first on these rows"
    text.write_text("a row put in front of all others\n" + text.read_text(encoding="utf8"), encoding="utf8")
    other = LowMemTrainer(configuration(tmp_path, "r", is_keep_training=True, max_steps=4, eval_rows=16))
    other.train()
    (note,) = [note for note in other.live.run.notes if "reset" in note]
    assert "the data has changed since this run was saved" in note and other.live.best.step == 4
