"""Scores of predicted labels, and which classes are confused.

Classes: accuracy, macro F1 (the mean over the classes that occur) and Matthews' correlation coefficient, from counts of
each class. Numbers: mean squared error, Pearson's correlation, and Spearman's, which is Pearson's of the ranks; equal
numbers share the mean of their ranks. A correlation with a constant is 0.
Source: Gorodkin 2004 (Matthews' coefficient of several classes).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from data.batches.collate import IGNORED_LABEL, Batch, flat_labels
from support.language import say
from tasks.base import Outputs, Processes, Scores, Watch

if TYPE_CHECKING:
    from engine.blockwise import Objective

Counts = NDArray[np.int64]
MOST_CLASSES_SHOWN = 12  # More classes are not shown as a matrix, but by the pairs that are most often confused.
# Pairs as label x classes + prediction, and how often each occurs:
NO_PAIRS: tuple[Counts, Counts] = (np.zeros(0, np.int64), np.zeros(0, np.int64))


class LabelScores(Scores):
    """Predictions beside labels, as they come; those without a label do not count.

    Args:
        names: of classes; none: labels are numbers.
        write: gets each batch and its outputs as well.
    Memory: with classes 16 bytes a pair of label and prediction that occurs; with numbers 8 bytes a label.
    """

    def __init__(self, names: Sequence[str], write: Watch | None = None) -> None:
        self.names = tuple(names)
        self._write = write
        self._pairs = NO_PAIRS
        self._numbers: list[NDArray[np.float32]] = []  # (2, n): labels and predictions

    def watch(self, batch: Batch, objective: Objective) -> None:
        """See `Scores`."""
        from engine.objectives.labels import LabelObjective

        logits = cast(LabelObjective, objective).logits
        assert logits is not None, "the loss of the batch was formed before"
        outputs = logits.cpu().numpy()
        self.add(batch, outputs)
        if self._write is not None:
            self._write(batch, outputs)

    def add(self, batch: Batch, logits: Outputs) -> None:
        """Count (R, L) outputs of the head for a batch."""
        labels = flat_labels(batch)
        if self.names:
            pairs = (labels * len(self.names) + logits.argmax(-1))[labels != IGNORED_LABEL]
            self._count_pairs(pairs, np.ones(len(pairs), np.int64))
        else:
            counted = ~np.isnan(labels)
            self._numbers.append(np.stack([labels[counted], logits[counted, 0]]).astype(np.float32))

    def _count_pairs(self, pairs: Counts, counts: Counts) -> None:
        all_pairs = np.concatenate([self._pairs[0], pairs])
        distinct, index = np.unique(all_pairs, return_inverse=True)
        sums = np.zeros(len(distinct), np.int64)
        np.add.at(sums, index, np.concatenate([self._pairs[1], counts]))
        self._pairs = (distinct, sums)

    def _matrix(self) -> tuple[Counts, Counts, Counts]:
        """Label, prediction and count of each pair that occurs."""
        pairs, counts = self._pairs
        return pairs // len(self.names), pairs % len(self.names), counts

    def gather(self, processes: Processes) -> None:
        """Count those of all processes together."""
        if self.names:
            everyone = processes.gather(self._pairs)
            self._pairs = NO_PAIRS
            for pairs, counts in everyone:
                self._count_pairs(pairs, counts)
        else:
            self._numbers = list(chain.from_iterable(processes.gather(self._numbers)))

    def result(self) -> dict[str, float]:
        """Score name -> value; empty where nothing was counted."""
        if self.names:
            return self._scores_of_classes() if len(self._pairs[0]) else {}
        labels, predictions = np.concatenate([*self._numbers, np.zeros((2, 0), np.float32)], axis=1).astype(np.float64)
        if not len(labels):
            return {}
        return {
            "mse": float(np.mean((labels - predictions) ** 2)),
            "pearson": correlation(labels, predictions),
            "spearman": correlation(ranks(labels), ranks(predictions)),
        }

    def _scores_of_classes(self) -> dict[str, float]:
        label_of, prediction_of, counts = self._matrix()
        labels = np.bincount(label_of, counts, len(self.names))
        predictions = np.bincount(prediction_of, counts, len(self.names))
        hits = np.bincount(label_of, counts * (label_of == prediction_of), len(self.names))
        total = labels.sum()
        right = hits.sum()
        occurs = labels + predictions > 0
        f1 = 2 * hits[occurs] / (labels + predictions)[occurs]
        spread = np.sqrt((total**2 - predictions @ predictions) * (total**2 - labels @ labels))
        matthews = (right * total - labels @ predictions) / spread if spread else 0.0
        return {"accuracy": float(right / total), "macro_f1": float(f1.mean()), "matthews": float(matthews)}

    def table(self) -> list[tuple[str, str]]:
        """Rows of a table of labels and what was predicted for them; of many classes the pairs that are most often
        confused; none of numbers.
        """
        if not len(self._pairs[0]):
            return []
        labels, predictions, counts = self._matrix()
        if len(self.names) > MOST_CLASSES_SHOWN:
            return self._confused(labels, predictions, counts)
        matrix = np.zeros((len(self.names), len(self.names)), np.int64)
        matrix[labels, predictions] = counts
        cells = [list(map("{:,}".format, row)) for row in matrix]
        width = max(map(len, chain(self.names, *cells)))
        titles = (say("label \\ prediction"), *(f"  {name}" for name in self.names))
        lines = (" ".join(cell.rjust(width) for cell in row) for row in (self.names, *cells))
        return list(zip(titles, lines, strict=True))

    def _confused(self, labels: Counts, predictions: Counts, counts: Counts) -> list[tuple[str, str]]:
        """The pairs of classes that are most often confused."""
        rows: list[tuple[str, str]] = [(say("label \\ prediction"), say("most often confused"))]
        for pair in np.argsort(np.where(labels == predictions, 0, -counts), kind="stable")[:MOST_CLASSES_SHOWN]:
            label = labels[pair]
            prediction = predictions[pair]
            if label != prediction:
                share = say("{count} of {all}", count=f"{counts[pair]:,}", all=f"{counts[labels == label].sum():,}")
                rows.append((f"  {self.names[label]} \\ {self.names[prediction]}", share))
        return rows if len(rows) > 1 else []


def ranks(numbers: NDArray[np.float64]) -> NDArray[np.float64]:
    _, index, counts = np.unique(numbers, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[index]


def correlation(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    one = one - one.mean()
    other = other - other.mean()
    size = float(np.sqrt((one @ one) * (other @ other)))
    return float(one @ other) / size if size else 0.0
