"""Scores of vectors: how well their cosines order pairs of texts by a number, and what a text finds among all others.

Numbers: Spearman's and Pearson's correlation with the cosines. Texts that belong together: the first text of each row
looks among the second and further texts of all rows, equal ones counted once; those that some row puts beside it are
relevant. Recall at 1 and 10 is the share of them that is found, MRR the mean of 1 / rank of the first that is, nDCG
with gains of 1; both look at the best 10.
Source: Järvelin & Kekäläinen 2002 (nDCG); the evaluators of sentence-transformers 6.2.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import chain
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from data.batches.collate import Batch, EmbeddingBatch
from engine.blockwise import Objective
from engine.objectives.embedding import EmbeddingObjective, Texts, pad_targets
from tasks.base import Processes, Scores
from tasks.label_scores import correlation, ranks

DEPTH = 10  # Ranks that are looked at.
AT_ONCE = 256  # So many texts look at a time.
Rows = tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.int64], list[NDArray[np.float32]]]


class EmbeddingScores(Scores):
    """Vectors as they come.

    Memory: 4 bytes a number of the vectors, and a piece of the cosines of all texts with all.
    """

    def __init__(self) -> None:
        self._rows: list[Rows] = []
        self._objective: EmbeddingObjective | None = None

    def watch(self, batch: Batch, objective: Objective) -> None:
        """See `Scores`."""
        self._objective = cast(EmbeddingObjective, objective)
        assert self._objective.vectors is not None, "the loss of the batch was formed before"
        assert isinstance(batch, EmbeddingBatch)
        vectors = self._objective.vectors.float().cpu().numpy()
        self._rows.append((vectors, batch.labels[:, 0], batch.row_texts, list(batch.targets)))

    def gather(self, processes: Processes) -> None:
        """See `Scores`."""
        self._rows = list(chain.from_iterable(processes.gather(self._rows)))

    def result(self) -> dict[str, float]:
        """The loss of all rows as one batch, and the scores of the kinds of rows that there are."""
        if not self._rows or self._objective is None:
            return {}
        vectors, numbers, row_texts = (np.concatenate([rows[column] for rows in self._rows]) for column in range(3))
        targets = pad_targets([each for *_, of_rows in self._rows for each in of_rows])
        texts = Texts(*map(torch.from_numpy, (vectors, numbers, row_texts, targets)))
        result = {"loss": float(self._objective.loss_of(texts)) / len(row_texts)}
        firsts = np.cumsum(row_texts) - row_texts
        directions = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        is_graded = (row_texts > 1) & ~np.isnan(targets[:, 0])
        if is_graded.any():
            pairs = firsts[is_graded]
            cosines = np.einsum("ij,ij->i", directions[pairs], directions[pairs + 1], dtype=np.float64)
            labels = targets[is_graded, 0].astype(np.float64)
            result["spearman"] = correlation(ranks(labels), ranks(cosines))
            result["pearson"] = correlation(labels, cosines)
        belongs = (row_texts > 1) & ~is_graded
        if belongs.any():
            result |= _found(directions, numbers, firsts, row_texts, np.flatnonzero(belongs))
        return result


def _found(
    directions: NDArray[np.float32],
    numbers: NDArray[np.int64],
    firsts: NDArray[np.int64],
    row_texts: NDArray[np.int64],
    rows: NDArray[np.int64],
) -> dict[str, float]:
    """The scores of what the first text of each of these rows finds; see `Texts` for the arrays."""
    relevant = defaultdict[int, set[int]](set)
    queries = dict[int, int]()  # Number -> place of a text, equal ones once.
    corpus = dict[int, int]()
    for row in rows.tolist():
        first = int(firsts[row])
        query = int(numbers[first])
        queries.setdefault(query, first)
        relevant[query].add(int(numbers[first + 1]))
        for place in range(first + 1, first + int(row_texts[row])):
            corpus.setdefault(int(numbers[place]), place)
    documents = directions[list(corpus.values())]
    names = np.array(list(corpus))
    depth = min(DEPTH, len(names))
    discounts = 1 / np.log2(np.arange(DEPTH) + 2)
    totals = np.zeros(4)
    places = np.array(list(queries.values()))
    for begin in range(0, len(places), AT_ONCE):
        scores = directions[places[begin : begin + AT_ONCE]] @ documents.T
        best = np.argsort(-scores, axis=1, kind="stable")[:, :depth]
        for place, found in zip(places[begin : begin + AT_ONCE], names[best], strict=True):
            wanted = relevant[int(numbers[place])]
            hits = np.array([name in wanted for name in found.tolist()])
            ideal = discounts[: len(wanted)].sum()
            first_hit = 1 / (1 + int(hits.argmax())) if hits.any() else 0.0
            totals += (hits[0] / len(wanted), hits.sum() / len(wanted), first_hit, hits @ discounts[:depth] / ideal)
    return dict(zip(("recall@1", "recall@10", "mrr@10", "ndcg@10"), (totals / len(places)).tolist(), strict=True))
