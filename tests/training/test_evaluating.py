"""What an evaluation within a run says."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from settings.loading import load
from settings.tasks import task_named
from training import evaluating
from training.evaluation.losses import Evaluation
from training.evaluation.stopping import BestMetric

CONFIG = load("train", {"train_file": "x"})


def test_a_rising_loss_is_told_with_its_rows_and_the_step_that_is_still_the_best(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sentences = list[str]()
    live: Any = SimpleNamespace(
        state=SimpleNamespace(step=60),
        best=BestMetric(step=40),
        evaluated=lambda *_, **__: False,
        run=SimpleNamespace(validation=SimpleNamespace(sets={}, num_rows=500)),
        task=task_named("span"),
        train=CONFIG.train,
        metrics=CONFIG.metrics,
        controller=SimpleNamespace(before=lambda *_: None),
        monitor=SimpleNamespace(phase=nullcontext),
        log=SimpleNamespace(event=lambda _, sentence, **__: sentences.append(sentence), memory=lambda *_: None),
    )
    monkeypatch.setattr(evaluating, "_loss", lambda *_: Evaluation(3.0, tokens=90, rows=64))
    monkeypatch.setattr(evaluating, "_scores", lambda *_: ({}, []))
    assert not evaluating.evaluate(live)
    assert "64 of 500 rows" in sentences[0] and "step 40" in sentences[0]
