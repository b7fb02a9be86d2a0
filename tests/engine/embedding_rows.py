"""Rows of texts for the tests of embeddings, and a pass over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from data.batches.collate import EmbeddingRow, collate_texts
from engine.objectives.embedding import EmbeddingObjective
from engine.step import to_micro_batch
from model.micro_batch import MicroBatch
from model.t5 import T5
from tests.engine.small_models import Gradients, blockwise_of, pass_gradients, small_model

ROWS = 6
CPU = torch.device("cpu")


def rows_with(counts: Sequence[int], targets: Callable[[np.random.Generator], Any]) -> list[EmbeddingRow]:
    """Random rows, each of so many texts."""
    draw = np.random.default_rng(3)
    return [
        EmbeddingRow(
            [np.append(draw.integers(3, 61, draw.integers(1, 9)), 1) for _ in range(count)],
            np.array(targets(draw), np.float32).reshape(-1),
            int(draw.integers(2**62)),
        )
        for count in counts
    ]


KINDS: dict[str, Callable[[], list[EmbeddingRow]]] = {
    "contrastive": lambda: rows_with([2, 4, 2, 3, 2, 2], lambda draw: np.nan),
    "cosent": lambda: rows_with([2] * ROWS, lambda draw: draw.integers(0, 4)),
    "regression": lambda: rows_with([2] * ROWS, lambda draw: draw.random()),
    "distillation": lambda: rows_with([1] * ROWS, lambda draw: draw.standard_normal(24)),
}


def texts_of(rows: Sequence[EmbeddingRow]) -> list[NDArray[np.int64]]:
    return [text for row in rows for text in row.texts]


def embedding_model(compiled: bool, kind: str, **changes: Any) -> T5:
    """A small encoder with a head that gives vectors; compiled kernels attend where they can."""
    shape = {"head": "embedding", "num_decoder_layers": 0, "pooling": "mean", "d_kv": 16 if compiled else 8}
    return small_model("t5", **{**shape, **changes})


def micro_batches(model: T5, rows: Sequence[EmbeddingRow], cuts: Sequence[Sequence[int]]) -> list[MicroBatch]:
    """They are filled up with tokens of no row."""
    batches = [collate_texts([rows[number] for number in cut], 0) for cut in cuts]
    return [to_micro_batch(batch, model.config, CPU, ((64, 128, 256), ())) for batch in batches]


def objective_of(model: T5, kind: str, sizes: Sequence[int] = ()) -> EmbeddingObjective:
    assert model.embedding_head is not None
    return EmbeddingObjective(model.embedding_head, kind, 0.1, sizes)


def one_pass(
    model: T5,
    kind: str,
    rows: Sequence[EmbeddingRow],
    cuts: Sequence[Sequence[int]],
    saved: int = 0,
    sizes: Sequence[int] = (),
) -> Gradients:
    """The mean loss over rows, and the gradients."""
    blockwise = blockwise_of(model, saved, objective=objective_of(model, kind, sizes))
    return pass_gradients(blockwise, micro_batches(model, rows, cuts), len(rows))
