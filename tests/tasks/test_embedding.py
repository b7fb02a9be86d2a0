"""Rows for embeddings: which columns are read, what is stored, how they are cut; and the scores of vectors."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from data.batches.collate import EmbeddingBatch, EmbeddingRow, collate_texts
from data.batches.loader import StepLoader
from data.prepare.preparing import prepare
from data.tokenizers.tokenizer import Tokenizer
from engine.objectives.embedding import EmbeddingObjective
from settings.declared import Config
from settings.errors import UserError
from settings.loading import load
from tasks.embedding_scores import EmbeddingScores
from tests.engine.embedding_rows import embedding_model

Configure = Callable[..., Config]
ROWS = 120


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf8")
    return path


def batch_of(config: Config, rows: int = 3) -> tuple[list[list[str]], EmbeddingBatch]:
    """The texts and the batch of the first rows of training."""
    prepared = prepare(config)
    loader = StepLoader(prepared.train_dir, prepared.objective, config.data, config.model, 1)
    batch = loader.batch_of(np.arange(rows))
    assert isinstance(batch, EmbeddingBatch)
    tokenizer = Tokenizer.load(prepared.tokenizer_dir)
    texts = [
        tokenizer.decode_answer(ids[:length])
        for ids, length in zip(batch.input_ids, batch.input_lengths.tolist(), strict=True)
    ]
    ends = np.cumsum([0, *batch.row_texts])
    return [texts[begin:end] for begin, end in pairwise(ends)], batch


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"positive": "b", "anchor": "a"}, "a b"),
        ({"anchor": "a", "positive": "b", "negative_1": "c", "negative_2": "d", "label": 7}, "a b c d"),
        ({"query": "a", "pos": "b", "neg": ["c", "d"]}, "a b c d"),
        ({"query": "a", "pos": ["b"], "neg": []}, "a b"),
        ({"question": "a", "answer": "b"}, "a b"),
    ],
)
def test_texts_are_found_by_the_names_of_columns(
    configure: Configure, tmp_path: Path, row: dict[str, Any], expected: str
) -> None:
    file = written(tmp_path / "rows.jsonl", [row] * ROWS)
    texts, batch = batch_of(configure(train_file=file, head="embedding", tokenizer_type="byte"))
    assert texts == [expected.split()] * 3
    assert all(np.isnan(targets).all() and len(targets) == 1 for targets in batch.targets)


def test_each_positive_of_a_list_makes_an_example_with_all_negatives(configure: Configure, tmp_path: Path) -> None:
    row = {"query": "a", "pos": ["b", "c"], "neg": ["d", "e"]}
    config = configure(
        train_file=written(tmp_path / "rows.jsonl", [row] * ROWS), head="embedding", tokenizer_type="byte"
    )
    prepared = prepare(config)
    loader = StepLoader(prepared.train_dir, prepared.objective, config.data, config.model, 1)
    tokenizer = Tokenizer.load(prepared.tokenizer_dir)
    examples = Counter[str]()
    for number in range(loader.num_rows):
        batch = loader.batch_of(np.array([number]))
        texts = zip(batch.input_ids, batch.input_lengths.tolist(), strict=True)
        examples[" ".join(tokenizer.decode_answer(ids[:length]) for ids, length in texts)] += 1
    assert examples.keys() == {"a b d e", "a c d e"}
    assert examples["a b d e"] == pytest.approx(ROWS, abs=4)  # Some are held out.


def test_two_texts_may_have_a_number_and_columns_may_be_named(configure: Configure, tmp_path: Path) -> None:
    rows = [{"left": f"text {number}", "right": "other", "gold": number / 4} for number in range(ROWS)]
    usual = [{"sentence1": row["left"], "sentence2": row["right"], "score": row["gold"]} for row in rows]
    named = configure(
        train_file=written(tmp_path / "named.jsonl", rows),
        head="embedding",
        text_column="left,right",
        label_column="gold",
        tokenizer_type="byte",
    )
    known = configure(train_file=written(tmp_path / "usual.jsonl", usual), head="embedding", tokenizer_type="byte")
    for config in (named, known):
        texts, batch = batch_of(config)
        assert {second for _, second in texts} == {"other"}
        assert [float(each[0]) for each in batch.targets] == [int(first.split()[1]) / 4 for first, _ in texts]


def test_each_text_is_cut_and_has_its_prompt(configure: Configure, tmp_path: Path) -> None:
    file = written(tmp_path / "rows.jsonl", [{"anchor": "a" * 40, "positive": "b", "negative": "c" * 40}] * ROWS)
    config = configure(
        train_file=file,
        head="embedding",
        tokenizer_type="byte",
        max_seq_len=16,
        query_prompt="q: ",
        document_prompt="d: ",
    )
    texts, batch = batch_of(config)
    assert texts[0] == ["q: " + "a" * 12, "d: b", "d: " + "c" * 12]
    assert batch.input_lengths[:3].tolist() == [16, 5, 16]
    assert batch.encoder_lengths.tolist() == [37] * 3


@pytest.mark.parametrize("suffix", [".npy", ".parquet"])
def test_vectors_stay_with_their_texts(configure: Configure, tmp_path: Path, suffix: str) -> None:
    vectors = np.random.default_rng(0).standard_normal((ROWS, 5)).astype(np.float32)
    path = tmp_path / f"vectors{suffix}"
    if suffix == ".npy":
        np.save(path, vectors)
    else:
        cells = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), 5)
        pq.write_table(pa.table({"id": [str(at) for at in range(ROWS)], "vector": cells}), path)
    file = written(tmp_path / "rows.jsonl", [{"text": f"text {number}"} for number in range(ROWS)])
    config = configure(train_file=file, head="embedding", tokenizer_type="byte", teacher_vectors=path, embedding_size=5)
    texts, batch = batch_of(config)
    for (text,), targets in zip(texts, batch.targets, strict=True):
        assert np.array_equal(targets, vectors[int(text.split()[1])])
    with pytest.raises(UserError, match="--embedding_size=5"):
        prepare(config.with_changes(embedding_size=7))
    with pytest.raises(UserError, match="fewer"):
        prepare(config.with_changes(train_file=str(written(tmp_path / "more.jsonl", [{"text": "x"}] * (ROWS + 1)))))
    for content in (np.zeros((ROWS, 0)), np.full((ROWS, 5), np.nan)):
        np.save(tmp_path / "bad.npy", content)
        with pytest.raises(UserError, match="cannot be read"):
            prepare(config.with_changes(teacher_vectors=str(tmp_path / "bad.npy")))
    for name, cells in (("id", ["a"] * ROWS), ("vector", ["a"] * ROWS), ("vector", [[1.0], None] * (ROWS // 2))):
        pq.write_table(pa.table({name: cells}), tmp_path / "bad.parquet")
        with pytest.raises(UserError, match="cannot be read"):
            prepare(config.with_changes(teacher_vectors=str(tmp_path / "bad.parquet")))
    half = [{"text": f"text {number}"} for number in range(ROWS // 2)]
    halves = [str(written(tmp_path / f"half-{number}.jsonl", half)) for number in range(2)]
    with pytest.raises(UserError, match="more"):
        prepare(config.with_changes(train_file=",".join(halves)))


def test_a_column_that_the_first_rows_do_not_have_counts(configure: Configure, tmp_path: Path) -> None:
    pairs = [{"query": f"q{number}", "pos": "p"} for number in range(300)]
    rows = [*pairs, *[{"query": f"late{number}", "pos": "p", "neg": "n"} for number in range(200)]]
    file = written(tmp_path / "rows.jsonl", rows)
    prepared = prepare(configure(train_file=file, head="embedding", tokenizer_type="byte"))
    assert prepared.counts["train_texts"] - 2 * prepared.counts["train_rows"] == pytest.approx(200, abs=10)
    scored = [{"sentence1": f"a{number}", "sentence2": "b"} for number in range(300)]
    scored += [{"sentence1": f"c{number}", "sentence2": "d", "score": 0.5} for number in range(200)]
    config = configure(train_file=written(tmp_path / "scored.jsonl", scored), head="embedding", tokenizer_type="byte")
    loader_batch = batch_of(config, 450)[1]
    assert 100 < sum(not np.isnan(targets[0]) for targets in loader_batch.targets) < 200


def test_a_list_in_a_csv_file_is_one(configure: Configure, tmp_path: Path) -> None:
    line = 'a,"[""b"", ""c""]",[]\n'
    (tmp_path / "rows.csv").write_text("query,pos,neg\n" + line * ROWS)
    config = configure(train_file=tmp_path / "rows.csv", head="embedding", tokenizer_type="byte")
    assert {tuple(row) for row in batch_of(config)[0]} <= {("a", "b"), ("a", "c")}


def test_rows_that_teach_nothing_are_refused(configure: Configure, tmp_path: Path) -> None:
    for row, word in (
        ({"anchor": "a", "positive": " "}, "empty"),
        ({"sentence1": "a", "sentence2": "b", "score": "much"}, "number"),
        ({"first": "a", "second": "b"}, "--text_column"),
        ({"query": "a", "pos": ["b \ud800"]}, "surrogate"),
        ({"query": "a", "pos": "b", "neg": ["c", "d", "e \ud83d"]}, "surrogate"),
    ):
        file = written(tmp_path / "rows.jsonl", [row] * ROWS)
        with pytest.raises(UserError, match=word):
            prepare(configure(train_file=file, head="embedding", tokenizer_type="byte"))


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ({"matryoshka_sizes": "999"}, "matryoshka_sizes"),
        ({"embedding_loss": "distillation"}, "teacher_vectors"),
        ({"teacher_vectors": "v.npy", "embedding_loss": "cosent"}, "embedding_loss"),
        ({"teacher_vectors": "v.npy", "skip_bad_rows": True}, "skip_bad_rows"),
        ({"objective": "pairs"}, "objective"),
        ({"num_decoder_layers": 2}, "num_decoder_layers"),
        ({"metric_for_best": "accuracy"}, "metric_for_best"),
    ],
)
def test_contradictions_are_refused(flags: dict[str, Any], word: str) -> None:
    with pytest.raises(UserError, match=word):
        load("train", {"head": "embedding", "train_file": "x", **flags})


def scores_of(vectors: list[list[float]], rows: list[EmbeddingRow]) -> dict[str, float]:
    """What is counted of rows whose texts have these vectors."""
    model = embedding_model(True, "contrastive")
    assert model.embedding_head is not None
    objective = EmbeddingObjective(model.embedding_head)
    objective.vectors = torch.tensor(vectors)
    scores = EmbeddingScores()
    scores.watch(collate_texts(rows, 0), objective)
    return scores.result()


def row_of(*texts: int, score: float = np.nan) -> EmbeddingRow:
    return EmbeddingRow([np.array([text, 1]) for text in texts], np.array([score], np.float32), 0)


def test_correlations_are_with_cosines() -> None:
    rows = [row_of(5, 6, score=0.0), row_of(5, 7, score=0.1), row_of(5, 8, score=5.0)]
    vectors = [[1.0, 0.0], [0.0, 2.0], [1.0, 0.0], [3.0, 3.0], [1.0, 0.0], [4.0, 0.0]]
    scores = scores_of(vectors, rows)
    assert scores["spearman"] == pytest.approx(1.0)
    assert scores["pearson"] == pytest.approx(np.corrcoef([0, 0.1, 5], [0, 0.5**0.5, 1])[0, 1], rel=1e-6)


def test_texts_look_among_the_texts_of_all_rows() -> None:
    """Documents lie at 0, 10, 20 and 60 degrees; the first query at 0 finds its own first, the second at 9 looks for
    the one at 20, which is third, and has another at 10.
    """
    angles = {10: 0, 11: 9, 12: 47, 20: 0, 21: 10, 22: 20, 23: 60}
    rows = [row_of(10, 20), row_of(11, 22, 23), row_of(11, 21), row_of(12, 23)]
    vectors = [
        [float(np.cos(np.deg2rad(angles[int(text[0])]))), float(np.sin(np.deg2rad(angles[int(text[0])])))]
        for row in rows
        for text in row.texts
    ]
    scores = scores_of(vectors, rows)
    # Query 11: 21, 20, 22, 23 in this order, of which 21 and 22 are relevant.
    gains = (1 + 1 / np.log2(4)) / (1 + 1 / np.log2(3))
    assert scores["recall@1"] == pytest.approx((1 + 1 / 2 + 1) / 3)
    assert scores["recall@10"] == scores["mrr@10"] == 1.0
    assert scores["ndcg@10"] == pytest.approx((2 + gains) / 3)
