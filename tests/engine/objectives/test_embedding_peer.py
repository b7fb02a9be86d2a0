"""Losses of embeddings and the gradients of all weights are those of sentence-transformers, however a step is cut into
micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from data.batches.collate import EmbeddingRow, collate_texts
from data.prepare.encode import TextEncoder
from data.tokenizers.tokenizer import Tokenizer
from data.tokenizers.training import train_tokenizer
from engine.objectives.embedding import EmbeddingObjective
from engine.step import to_micro_batch
from model import hf_format
from model.formats.sentence_transformers import MATRIX, STORED_MATRIX, TextSettings, write_text_settings
from model.formats.shape_file import published_names
from model.t5 import T5
from settings.declared import T5ModelConfig
from tests.engine.small_models import Gradients, blockwise_of, pass_gradients, relative_error
from tests.peer_vectors import ask_sentence_transformers

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
ANCHORS = [
    "how do rivers carve a valley",
    "who built the first bridge of iron",
    "what do bees eat in winter",
    "why is the sky blue",
    "when was the printing press invented",
    "where do swallows go",
    "which metal melts in the hand",
]
POSITIVES = [
    "water wears rock away over thousands of years",
    "the bridge at Coalbrookdale was cast by Abraham Darby",
    "bees live on honey that they have stored",
    "air scatters short waves of light more than long ones",
    "Gutenberg printed with movable letters about 1450",
    "swallows spend the winter south of the Sahara",
    "gallium melts at thirty degrees",
]
NEGATIVES = [
    "a valley is a low place between hills",
    "steel bridges rust",
    "bears sleep in winter",
    "the sea looks green near the shore",
    "paper was made in China",
    "swallows eat flies",
    "iron melts at 1538 degrees",
]
SCORES = [0.9, 0.1, 0.5, 0.5, 0.25, 1.0, 0.0]
ROWS = len(ANCHORS)
SYMMETRIC = "MultipleNegativesSymmetricRankingLoss"


class Case(NamedTuple):
    """One loss, here and there.

    Args:
        columns: of texts. targets: (B, W), NaN: there are none.
        kind: the setting embedding_loss. sizes: the setting matryoshka_sizes.
        peer: class and options. head: settings of the head.
    """

    columns: Sequence[Sequence[str]]
    targets: Any
    kind: str
    peer: tuple[str, dict[str, Any]]
    sizes: tuple[int, ...] = ()
    head: dict[str, Any] = {}  # noqa: RUF012


def unit_vectors(width: int) -> Any:
    vectors = np.random.default_rng(3).standard_normal((ROWS, width)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


NONE = np.full((ROWS, 1), np.nan, np.float32)
GRADED = np.array(SCORES, np.float32)[:, None]
PAIRS = [ANCHORS, POSITIVES]
TRIPLETS = [ANCHORS, POSITIVES, NEGATIVES]
CASES = {
    "contrastive": Case(PAIRS, NONE, "auto", (SYMMETRIC, {"scale": 20.0})),
    "contrastive, warmer": Case(PAIRS, NONE, "contrastive", (SYMMETRIC, {"scale": 5.0})),
    "hard negatives": Case(TRIPLETS, NONE, "auto", (SYMMETRIC, {"scale": 20.0})),
    "two hard negatives": Case([*TRIPLETS, NEGATIVES[::-1]], NONE, "auto", (SYMMETRIC, {"scale": 20.0})),
    "no length, no matrix": Case(
        TRIPLETS, NONE, "auto", (SYMMETRIC, {"scale": 20.0}), head={"normalize": False, "embedding_size": 0}
    ),
    "cosent": Case(PAIRS, GRADED, "auto", ("CoSENTLoss", {"scale": 20.0})),
    "regression": Case(PAIRS, GRADED, "regression", ("CosineSimilarityLoss", {})),
    "distillation": Case([ANCHORS], unit_vectors(24), "auto", ("MSELoss", {})),
    "distillation, no length": Case(
        [ANCHORS], 3 * unit_vectors(24), "distillation", ("MSELoss", {}), head={"normalize": False}
    ),
    "matryoshka": Case(TRIPLETS, NONE, "auto", (SYMMETRIC, {"scale": 20.0}), sizes=(24, 12, 5)),
    "matryoshka, cosent": Case(PAIRS, GRADED, "auto", ("CoSENTLoss", {"scale": 20.0}), sizes=(24, 8)),
    "first token": Case(PAIRS, NONE, "auto", (SYMMETRIC, {"scale": 20.0}), head={"pooling": "first"}),
    "last token": Case(PAIRS, NONE, "auto", (SYMMETRIC, {"scale": 20.0}), head={"pooling": "last"}),
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer([*ANCHORS, *POSITIVES, *NEGATIVES], "bpe", 384, 2**20)


def encoder(folder: Path, tokenizer: Tokenizer, **head: Any) -> T5:
    """A small encoder with a head, as it is read from a folder that sentence-transformers reads too."""
    shape = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "num_layers": 3, "num_decoder_layers": 0}
    config = T5ModelConfig(vocab_size=384, **{**shape, "head": "embedding", "embedding_size": 24, **head})
    model = T5(config).initialise(2)
    for name, weight in model.named_parameters():
        if name.endswith("bias.table"):
            weight.data.normal_(generator=torch.Generator().manual_seed(1))
    hf_format.save(model, folder)
    write_text_settings(folder, TextSettings(64))
    tokenizer.save(folder)
    return hf_format.load(folder)


def our_gradients(model: T5, tokenizer: Tokenizer, case: Case, rows_at_once: int) -> Gradients:
    """Mean loss and gradients of all rows, in micro-batches of so many."""
    texts = TextEncoder(tokenizer)
    rows = [
        EmbeddingRow([np.append(ids, tokenizer.eos_id).astype(np.int64) for ids in texts.encode(columns)], targets, key)
        for key, (*columns, targets) in enumerate(zip(*case.columns, case.targets, strict=True))
    ]
    batches = [collate_texts(rows[first : first + rows_at_once], 0) for first in range(0, ROWS, rows_at_once)]
    micro_batches = [to_micro_batch(batch, model.config, torch.device("cpu")) for batch in batches]
    assert model.embedding_head is not None
    temperature = 1 / case.peer[1].get("scale", 20.0)
    objective = EmbeddingObjective(model.embedding_head, case.kind, temperature, case.sizes)
    return pass_gradients(blockwise_of(model, objective=objective), micro_batches, ROWS)


@pytest.mark.parametrize("name", CASES)
def test_losses_are_those_of_sentence_transformers(name: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    case = CASES[name]
    folder = tmp_path / "model"
    model = encoder(folder, tokenizer, **case.head)
    labels = None if case.targets is NONE else case.targets.squeeze(1) if case.targets is GRADED else case.targets
    answer, arrays = ask_sentence_transformers(
        tmp_path,
        do="loss",
        folder=folder,
        columns=case.columns,
        labels=None if labels is None else labels.tolist(),
        loss=case.peer,
        sizes=case.sizes,
    )
    expected = {name.removeprefix("model."): torch.from_numpy(array) for name, array in arrays.items()}
    names = {**published_names(model.config), MATRIX: STORED_MATRIX}
    for rows_at_once in (1, 3, ROWS):
        loss, gradients = our_gradients(model, tokenizer, case, rows_at_once)
        assert loss == pytest.approx(answer["loss"], rel=1e-5)
        assert {names[name] for name in gradients} == expected.keys()
        errors = {name: relative_error(gradient, expected[names[name]]) for name, gradient in gradients.items()}
        assert max(errors.values()) < 1e-5, errors
