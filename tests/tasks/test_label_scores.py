"""Scores of predicted labels are those of scipy and scikit-learn, or of the definitions written out."""

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


def classes(seed: int = 0) -> tuple[LabelScores, NDArray[np.int64], NDArray[np.int64]]:
    """Scores of 500 places in parts, a fifth of them masked; what was predicted, and the labels that count."""
    rng = np.random.default_rng(seed)
    labels, logits = rng.integers(3, size=500), rng.normal(size=(500, 4)).astype(np.float32)
    logits[np.arange(500), labels] += 1.0
    logits[:, 3] = -9.0
    labels[rng.random(500) < 0.2] = IGNORED_LABEL
    scores = LabelScores(NAMES)
    for part in np.array_split(np.arange(500), 7):
        scores.add(batch(labels[part]), logits[part])
    counted = labels != IGNORED_LABEL
    return scores, logits.argmax(1)[counted], labels[counted]


def test_scores_of_classes_are_those_of_their_definitions() -> None:
    scores, predicted, labels = classes()
    found = scores.result()
    f1 = []
    for name in range(3):
        hits = np.sum((predicted == name) & (labels == name))
        f1.append(2 * hits / (np.sum(predicted == name) + np.sum(labels == name)))
    one_hot = [np.eye(4)[side] - np.eye(4)[side].mean(0) for side in (labels, predicted)]
    covariance = [
        np.sum(a * b) for a, b in ((one_hot[0], one_hot[1]), (one_hot[0], one_hot[0]), (one_hot[1], one_hot[1]))
    ]
    assert found["accuracy"] == pytest.approx(np.mean(predicted == labels))
    assert found["macro_f1"] == pytest.approx(np.mean(f1)), "a class that never occurs does not count"
    assert found["matthews"] == pytest.approx(covariance[0] / np.sqrt(covariance[1] * covariance[2]))
    constant = LabelScores(("a", "b"))
    constant.add(batch(np.array([0, 1, 0])), np.array([[1.0, 0.0]] * 3, np.float32))
    assert constant.result() == {"accuracy": pytest.approx(2 / 3), "macro_f1": pytest.approx(0.4), "matthews": 0.0}


def test_scores_of_numbers_are_those_of_their_definitions() -> None:
    """Ranks by comparing each number with each; ties share the mean of theirs."""
    rng = np.random.default_rng(1)
    labels = rng.integers(10, size=200) / 2  # many ties
    predictions = (labels + rng.normal(size=200)).astype(np.float32)
    masked = np.append(labels, np.nan).astype(np.float32)
    scores = LabelScores(())
    scores.add(batch(masked), np.append(predictions, 7.0)[:, None].astype(np.float32))
    found = scores.result()
    ranks = [np.array([np.sum(side < x) + (np.sum(side == x) + 1) / 2 for x in side]) for side in (labels, predictions)]
    assert found["mse"] == pytest.approx(np.mean((labels - predictions) ** 2), rel=1e-6)
    assert found["pearson"] == pytest.approx(np.corrcoef(labels, predictions)[0, 1])
    assert found["spearman"] == pytest.approx(np.corrcoef(*ranks)[0, 1])
    constant = LabelScores(())
    constant.add(batch(np.arange(3.0, dtype=np.float32)), np.zeros((3, 1), np.float32))
    assert constant.result()["spearman"] == 0.0 and LabelScores(()).result() == {}


def test_scores_are_those_of_scikit_learn_and_scipy() -> None:
    metrics, stats = pytest.importorskip("sklearn.metrics"), pytest.importorskip("scipy.stats")
    scores, predicted, labels = classes(2)
    assert scores.result() == {
        "accuracy": pytest.approx(metrics.accuracy_score(labels, predicted)),
        "macro_f1": pytest.approx(metrics.f1_score(labels, predicted, average="macro")),
        "matthews": pytest.approx(metrics.matthews_corrcoef(labels, predicted)),
    }
    numbers = np.random.default_rng(3).normal(size=(2, 50)).round(1)
    of_numbers = LabelScores(())
    of_numbers.add(batch(numbers[0].astype(np.float32)), numbers[1][:, None].astype(np.float32))
    assert of_numbers.result()["spearman"] == pytest.approx(stats.spearmanr(*numbers)[0])


def test_of_many_classes_the_pairs_most_often_confused_are_shown() -> None:
    names, rng = [f"c{at}" for at in range(2000)], np.random.default_rng(4)
    scores, all_labels, all_predicted = LabelScores(names), [], []
    for _ in range(3):
        labels, predicted = rng.integers(2000, size=300), rng.integers(2000, size=300)
        labels[:40], predicted[:40] = 7, 9
        logits = np.zeros((300, 2000), np.float32)
        logits[np.arange(300), predicted] = 1.0
        scores.add(batch(labels), logits)
        all_labels.append(labels), all_predicted.append(predicted)
    right = np.concatenate(all_labels) == np.concatenate(all_predicted)
    assert scores.result()["accuracy"] == pytest.approx(right.mean())
    (first, count), *others = scores.table()[1:]
    assert first.split() == ["c7", "\\", "c9"] and count.startswith("120 ") and len(others) < 12


def test_confusions_are_a_table_of_counts() -> None:
    scores, predicted, labels = classes()
    rows = scores.table()
    assert [name.strip() for name, _ in rows[1:]] == list(NAMES) and rows[0][1].split() == list(NAMES)
    assert [int(cell) for cell in rows[1][1].split()] == [
        np.sum((labels == 0) & (predicted == name)) for name in range(4)
    ]
    assert LabelScores(()).table() == []
