"""What is left of a run, and how long it takes."""

from __future__ import annotations

from typing import Any

import pytest

from memory.estimate.time import RENEWED_STEPS, Renewal, remaining_work
from settings.declared import Config
from settings.loading import load


def settings_of(**flags: Any) -> Config:
    return load("train", {"train_file": "x", "max_steps": 100, "eval_steps": 30, "save_steps": 50, **flags})


def test_what_is_left_of_a_run_is_counted() -> None:
    whole = remaining_work(settings_of(), 0, held_out=1000, answer_tokens=64)
    # Evaluations: 0, 30, 60, 90, 100; saves: 30, 50, 60, 90, 100.
    assert (whole.steps, whole.saves, whole.evaluated_rows) == (100, 5, 5 * 64)
    later = remaining_work(settings_of(), 60, held_out=10, answer_tokens=64, num_processes=4)
    assert (later.steps, later.saves, later.evaluated_rows) == (40, 2, 2 * 3)
    for held_out, rows, saves in ((0, 0, 2), (1, 5, 5)):
        few = remaining_work(settings_of(), 0, held_out, answer_tokens=64)
        assert (few.evaluated_rows, few.saves) == (rows, saves)
    ended = remaining_work(settings_of(), 100, held_out=9, answer_tokens=64)
    assert (ended.steps, ended.saves, ended.evaluated_rows) == (0, 0, 0)
    assert ended.answer_tokens > 0, "samples are written all the same"


def test_after_the_first_steps_the_rest_takes_as_long_as_they_did() -> None:
    renewal = Renewal(step_seconds=1.0, total_seconds=150.0, steps=100)
    durations = [renewal.after_step(2.0) for _ in range(40)]
    (renewed,) = [duration for duration in durations if duration is not None]
    assert durations.index(renewed) == RENEWED_STEPS - 1
    assert renewed.seconds == pytest.approx(80 * (2.0 + 2 * 0.5)), "steps, and their share of what lies around them"
    assert renewed.low < renewed.seconds < renewed.high < 1.2 * renewed.seconds
    short = Renewal(1.0, 150.0, RENEWED_STEPS)
    assert not any(short.after_step(2.0) for _ in range(RENEWED_STEPS)), "nothing is left then"
