"""A run that goes on over other rows says so, and compares no number with one that was measured on others."""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from data.tokenizers.training import byte_tokenizer
from settings.loading import load
from tests.end_to_end.running import write_text
from tests.training.small_runs import configuration
from trainer_low_mem import LowMemTrainer
from training.checkpoints.state import TrainingState
from training.evaluation.stopping import LOSS, BestMetric, MeasuredOn
from training.setup.data import fitted_vocabulary, rolled_back, taken_up

ROWS = asdict(MeasuredOn("0a", 198, 2, 2, 0))
SAVED = TrainingState(
    step=4,
    best_eval_loss=2.5,
    first_eval_loss=3.0,
    best_metric=BestMetric(LOSS, 1, 2.5, 4).state(),
    best_evaluation={"step": 4, "loss": 2.5},
    measured_on=ROWS,
)
ANEW = {"best_eval_loss": None, "best_evaluation": None}


@pytest.mark.parametrize(
    "metric, changes, lost, expected_words",
    [
        (LOSS, {}, {}, []),
        (
            LOSS,
            {"content": "0b", "train_rows": 1999},
            {**ANEW, "best_metric": None},
            ["198 rows and 2 held out to 1,999 rows and 2;"],
        ),
        (
            LOSS,
            {"eval_rows": 64},
            {**ANEW, "best_metric": None},
            ["best loss starts over: it was measured on 2 rows, and is now measured on 64 rows"],
        ),
        (
            "chrf",
            {"answered_rows": 8},
            {"best_metric": None},
            ["best chrf starts over: it was measured on 0 rows, and is now measured on 8"],
        ),
        ("chrf", {"eval_rows": 64, "answered_rows": 8}, {**ANEW, "best_metric": None}, ["best loss", "best chrf"]),
    ],
)
def test_what_was_measured_on_other_rows_is_sought_anew(
    metric: str, changes: dict[str, Any], lost: dict[str, Any], expected_words: list[str]
) -> None:
    now = {**ROWS, **changes}
    state, notes = taken_up(SAVED, now, metric)
    assert state == replace(SAVED, measured_on=now, **lost)
    assert len(notes) == len(expected_words) and all(
        words in note for words, note in zip(expected_words, notes, strict=True)
    ), notes


def resumed(folder: Path, **flags: object) -> LowMemTrainer:
    """The run `r` of this folder, gone on with."""
    trainer = LowMemTrainer(configuration(folder, "r", is_keep_training=True, **flags))
    trainer.train()
    return trainer


def changes_told(trainer: LowMemTrainer) -> list[str]:
    return [note for note in trainer.live.run.notes if "starts over" in note]


def test_a_run_that_goes_on_knows_its_rows(tmp_path: Path) -> None:
    """Wherever they lie, and whenever they were prepared."""
    text = tmp_path / "text.txt"
    write_text(text)
    LowMemTrainer(configuration(tmp_path, "r", max_steps=2, eval_steps=1, eval_rows=2)).train()
    os.utime(text, (0, 0))
    shutil.rmtree(tmp_path / "cache")
    more = resumed(tmp_path, max_steps=3, eval_rows=16)
    assert len(changes_told(more)) == 1 and "it was measured on 2 rows" in changes_told(more)[0], "the same data"
    assert more.live.best.step == more.live.state.step == 3, "the first on these rows"
    checkpoint = more.live.checkpoints.latest()
    run = more.live.run
    beginning = run.starting_from(
        run.base, replace(run.state, measured_on={**ROWS, "content": "other"}), run.is_resumed
    )
    assert rolled_back(beginning, checkpoint, more.live.state).state.best_metric is None, "nor on the way back"

    untouched = run.starting_from(run.base, TrainingState(), run.is_resumed)
    first = {"metric": "loss", "patience": 0, "value": 7.0, "step": 0, "evals_since": 2}
    now = replace(more.live.state, step=3, first_eval_loss=7.0, best_metric=first)
    again = rolled_back(untouched, None, now).state
    assert again.best_metric == {**first, "evals_since": 0} and again.best_eval_loss == 7.0, (
        "step 0 is not measured again"
    )
    assert rolled_back(untouched, None, replace(now, best_metric={**first, "step": 2})).state.best_metric is None

    text.write_text("a row put in front of all others\n" + text.read_text(encoding="utf8"), encoding="utf8")
    other = resumed(tmp_path, max_steps=4, eval_rows=16)
    assert len(changes_told(other)) == 1 and "the data has changed since this run was saved" in changes_told(other)[0]
    assert other.live.best.step == 4 and other.live.state.first_eval_loss is not None


@pytest.mark.parametrize(("vocab_size", "is_told"), [(None, True), ("8192", False), ("512", False)])
def test_room_that_no_token_takes_is_told(vocab_size: str | None, is_told: bool) -> None:
    flags = {} if vocab_size is None else {"vocab_size": vocab_size}
    config = load("train", {"train_file": "a.txt", "model_preset": "tiny", **flags})
    settings, notes = fitted_vocabulary(config.model, byte_tokenizer(), "auto", True, config.origin)
    assert "vocab_size" not in settings, "nothing is changed"
    assert bool(notes) is is_told
    assert all("--vocab_size=384" in note for note in notes)
