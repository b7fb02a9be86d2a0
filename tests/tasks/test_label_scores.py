"""Scores of predicted labels are those of their definitions, written out."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from data.batches.collate import IGNORED_LABEL, LabelledBatch
from tasks.label_scores import LabelScores

NAMES = ("C", "E", "H", "never")


def batch(labels: NDArray[np.int64] | NDArray[np.float32]) -> LabelledBatch:
    rows = np.zeros(len(labels), np.int64)
    return LabelledBatch(rows[:, None], rows + 1, labels[:, None], rows, rows)


def classes() -> tuple[LabelScores, NDArray[np.int64], NDArray[np.int64]]:
    """Scores of 500 labels in parts, a fifth of them masked; what was predicted, and the labels that count."""
    rng = np.random.default_rng(0)
    labels = rng.integers(3, size=500)
    logits = rng.normal(size=(500, 4)).astype(np.float32)
    logits[np.arange(500), labels] += 1.0
    logits[:, 3] = -9.0
    labels[rng.random(500) < 0.2] = IGNORED_LABEL
    scores = LabelScores(NAMES)
    for part in np.array_split(np.arange(500), 7):
        scores.add(batch(labels[part]), logits[part])
    counted = labels != IGNORED_LABEL
    return scores, logits.argmax(1)[counted], labels[counted]


def test_scores_of_classes_are_those_of_their_definitions() -> None:
    scores, predictions, labels = classes()
    f1 = []
    for name in range(3):
        hits = np.sum((predictions == name) & (labels == name))
        f1.append(2 * hits / (np.sum(predictions == name) + np.sum(labels == name)))
    one_hot = [np.eye(4)[side] - np.eye(4)[side].mean(0) for side in (labels, predictions)]
    covariance = np.array([[np.sum(one * other) for one in one_hot] for other in one_hot])
    assert scores.result() == {
        "accuracy": pytest.approx(np.mean(predictions == labels)),
        "macro_f1": pytest.approx(np.mean(f1)),  # A class that never occurs does not count.
        "matthews": pytest.approx(covariance[0, 1] / np.sqrt(covariance[0, 0] * covariance[1, 1])),
    }
    constant = LabelScores(("a", "b"))
    constant.add(batch(np.array([0, 1, 0])), np.array([[1.0, 0.0]] * 3, np.float32))
    assert constant.result() == {"accuracy": pytest.approx(2 / 3), "macro_f1": pytest.approx(0.4), "matthews": 0.0}
    rows = scores.table()
    assert rows[0][1].split() == list(NAMES)
    assert [name.strip() for name, _ in rows[1:]] == list(NAMES)
    counts = [np.sum((labels == 0) & (predictions == name)) for name in range(4)]
    assert [int(cell) for cell in rows[1][1].split()] == counts


def test_scores_of_numbers_are_those_of_their_definitions() -> None:
    """Ranks by comparing each number with each; ties share the mean of theirs."""
    rng = np.random.default_rng(1)
    labels = rng.integers(10, size=200) / 2  # many ties
    predictions = (labels + rng.normal(size=200)).astype(np.float32)
    masked = np.append(labels, np.nan).astype(np.float32)
    scores = LabelScores(())
    scores.add(batch(masked), np.append(predictions, 7.0)[:, None].astype(np.float32))
    ranks = [np.array([np.sum(side < x) + (np.sum(side == x) + 1) / 2 for x in side]) for side in (labels, predictions)]
    assert scores.result() == {
        "mse": pytest.approx(np.mean((labels - predictions) ** 2), rel=1e-6),
        "pearson": pytest.approx(np.corrcoef(labels, predictions)[0, 1]),
        "spearman": pytest.approx(np.corrcoef(*ranks)[0, 1]),
    }
    constant = LabelScores(())
    constant.add(batch(np.arange(3.0, dtype=np.float32)), np.zeros((3, 1), np.float32))
    assert constant.result()["spearman"] == 0.0
    assert LabelScores(()).result() == {}
    assert LabelScores(()).table() == []
