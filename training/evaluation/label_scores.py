"""Scores of predicted labels, and a confusion matrix of classes.

Classes: accuracy, macro F1 (the mean over the classes that occur) and Matthews' correlation coefficient, all from one confusion
matrix. Numbers: mean squared error, Pearson's correlation, and Spearman's, which is Pearson's of the ranks; equal numbers share
the mean of their ranks. A correlation with a constant is 0.
Source: Gorodkin 2004 (Matthews' coefficient of several classes).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.batches.collate import IGNORED_LABEL, Batch
from language import say
from training.processes.group import Group

Counts = NDArray[np.int64]
MOST_CLASSES_SHOWN = 12


class LabelScores:
    """Predictions beside labels, as they come; those without a label do not count.

    Args:
        names: of classes; none: labels are numbers.
    Memory: with classes 8 bytes x classes^2; with numbers 8 bytes a label.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.counts: Counts = np.zeros((len(names), len(names)), np.int64)  # label, prediction
        self._numbers: list[NDArray[np.float32]] = []  # (2, n): labels and predictions

    def add(self, batch: Batch, logits: NDArray[np.float32]) -> None:
        """Count (R, L) outputs of the head for a batch."""
        labels = labels_in(batch)
        if self.names:
            counted = labels != IGNORED_LABEL
            places = labels[counted] * len(self.names) + logits.argmax(-1)[counted]
            self.counts += np.bincount(places, minlength=self.counts.size).reshape(self.counts.shape)
        else:
            counted = ~np.isnan(labels)
            self._numbers.append(np.stack([labels[counted], logits[counted, 0]]).astype(np.float32))

    def gather(self, group: Group) -> None:
        """Count those of all processes together."""
        if group.size == 1:
            return
        if self.names:
            summed = group.all_reduce_sum(*self.counts.ravel().tolist())
            self.counts = np.array(summed).astype(np.int64).reshape(self.counts.shape)
        else:
            self._numbers = [part for parts in group.gather(self._numbers) for part in parts]

    def result(self) -> dict[str, float]:
        """Score name -> value; empty where nothing was counted."""
        if self.names:
            return scores_of_classes(self.counts) if self.counts.any() else {}
        labels, predictions = np.concatenate([*self._numbers, np.zeros((2, 0), np.float32)], axis=1).astype(np.float64)
        return scores_of_numbers(labels, predictions) if len(labels) else {}

    def table(self) -> list[tuple[str, str]]:
        """Rows of a table of labels and what was predicted for them; none of numbers, and of classes the most frequent ones."""
        if not self.counts.any():
            return []
        shown = np.sort(np.argsort(-self.counts.sum(1), kind="stable")[:MOST_CLASSES_SHOWN])
        cells = [[f"{count:,}" for count in self.counts[label, shown]] for label in shown]
        width = max(len(cell) for row in [[self.names[at] for at in shown], *cells] for cell in row)
        rows: list[tuple[str, str]] = [
            (say("label \\ prediction"), " ".join(self.names[at].rjust(width) for at in shown))
        ]
        rows += [
            (f"  {self.names[label]}", " ".join(cell.rjust(width) for cell in row))
            for label, row in zip(shown, cells, strict=True)
        ]
        return rows


def labels_in(batch: Batch) -> NDArray[Any]:
    """(R,) labels of a batch: one of each row, or of each of its tokens end to end."""
    if batch.labels.shape[1] == 1:
        return batch.labels[:, 0]
    return np.concatenate([row[:length] for row, length in zip(batch.labels, batch.input_lengths, strict=True)])


def scores_of_classes(counts: Counts) -> dict[str, float]:
    """Scores of a table of counts (label, prediction)."""
    table = counts.astype(np.float64)
    total, right, labels, predictions = table.sum(), table.trace(), table.sum(1), table.sum(0)
    occurs = labels + predictions > 0
    f1 = 2 * table.diagonal()[occurs] / (labels + predictions)[occurs]
    spread = np.sqrt((total**2 - predictions @ predictions) * (total**2 - labels @ labels))
    matthews = (right * total - labels @ predictions) / spread if spread else 0.0
    return {"accuracy": float(right / total), "macro_f1": float(f1.mean()), "matthews": float(matthews)}


def scores_of_numbers(labels: NDArray[np.float64], predictions: NDArray[np.float64]) -> dict[str, float]:
    """Scores of predicted numbers."""
    return {
        "mse": float(np.mean((labels - predictions) ** 2)),
        "pearson": _correlation(labels, predictions),
        "spearman": _correlation(_ranks(labels), _ranks(predictions)),
    }


def _ranks(numbers: NDArray[np.float64]) -> NDArray[np.float64]:
    _, places, counts = np.unique(numbers, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[places]


def _correlation(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    one, other = one - one.mean(), other - other.mean()
    size = float(np.sqrt((one @ one) * (other @ other)))
    return float(one @ other) / size if size else 0.0
