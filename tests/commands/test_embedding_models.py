"""Models with an embedding head: `embed`, `evaluate` and Python give the vectors that training compares."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commands.embed import embed
from commands.evaluate import evaluate
from commands.quantize import quantize
from serving.model import Model
from settings.errors import UserError
from tests.commands.small import encoder, flags_of, read_rows, write_rows

pytestmark = pytest.mark.usefixtures("one_thread")
SIZE = 12
PAIRS = [("a river", "water that runs"), ("bread", "flour, water and salt"), ("a bridge", "it leads over a river")]
Vectors = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model, and what its run says of texts."""
    folder = encoder(tmp_path_factory.mktemp("model"), head="embedding", embedding_size=SIZE)
    settings = {"query_prompt": "ask: ", "document_prompt": "text: ", "max_seq_len": 40, "matryoshka_sizes": "12,4"}
    (folder / "settings.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = ({"anchor": query, "positive": document} for query, document in PAIRS)
    return write_rows(tmp_path_factory.mktemp("rows") / "pairs.jsonl", rows)


def vectors_of(model: Path, texts: Path, output: Path, **flags: Any) -> Vectors:
    embed(flags_of("embed", model=model, input=texts, output=output, mixed_precision="no", **flags))
    vectors: Vectors = np.load(output)["vectors"]
    return vectors


def measured(model: Path, rows: Path, folder: Path, **flags: Any) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """What `evaluate` measures, and the rows that it writes."""
    arguments = {"model": model, "validation_file": rows, "mixed_precision": "no", "cache_dir": folder / "cache"}
    result = evaluate(flags_of("evaluate", output=folder / "cosines.jsonl", overwrite=True, **arguments, **flags))
    return {"loss": result.loss, **result.metrics}, read_rows(folder / "cosines.jsonl")


def test_vectors_are_those_that_are_evaluated(model: Path, pairs: Path, tmp_path: Path) -> None:
    """The columns of queries and of documents are found by the prompt that is asked for."""
    queries = vectors_of(model, pairs, tmp_path / "queries.npz", prompt_name="query")
    documents = vectors_of(model, pairs, tmp_path / "documents.npz")
    assert queries.shape == (len(PAIRS), SIZE)
    np.testing.assert_allclose(np.linalg.norm(queries, axis=1), 1, atol=1e-6)
    scores, rows = measured(model, pairs, tmp_path)
    assert [row["texts"] for row in rows] == [[f"ask: {query}", f"text: {document}"] for query, document in PAIRS]
    np.testing.assert_allclose((queries * documents).sum(1), [row["cosines"][0] for row in rows], atol=1e-6)
    ranks = [1 + int((queries[row] @ documents.T > queries[row] @ documents[row]).sum()) for row in range(len(PAIRS))]
    assert scores["recall@1"] == pytest.approx(np.mean([rank == 1 for rank in ranks]))
    assert scores["mrr@10"] == pytest.approx(np.mean([1 / rank for rank in ranks]))


def test_python_gives_the_same_vectors_with_either_prompt(model: Path, pairs: Path, tmp_path: Path) -> None:
    queries = vectors_of(model, pairs, tmp_path / "queries.npz", prompt_name="query")
    documents = vectors_of(model, pairs, tmp_path / "documents.npz")
    here = Model(model, mixed_precision="no")
    np.testing.assert_array_equal(here.embed([query for query, _ in PAIRS], prompt_name="query"), queries)
    np.testing.assert_array_equal(here.embed([document for _, document in PAIRS]), documents)
    np.testing.assert_allclose(here.embed([f"text: {PAIRS[0][1]}"], prompt_name="none"), documents[:1], atol=1e-6)
    with pytest.raises(UserError, match="passage"):
        here.embed(["x"], prompt_name="passage")


def test_graded_pairs_and_several_negatives_are_scored(model: Path, tmp_path: Path) -> None:
    graded = write_rows(
        tmp_path / "graded.jsonl",
        ({"sentence1": query, "sentence2": document, "score": at} for at, (query, document) in enumerate(PAIRS)),
    )
    scores, rows = measured(model, graded, tmp_path)
    assert [row["score"] for row in rows] == [0.0, 1.0, 2.0]
    cosines = [row["cosines"][0] for row in rows]
    assert scores["pearson"] == pytest.approx(np.corrcoef(cosines, range(3))[0, 1], abs=1e-4)
    triples = write_rows(
        tmp_path / "triples.jsonl",
        ({"query": query, "pos": [document], "neg": ["x", "y"]} for query, document in PAIRS),
    )
    scores, rows = measured(model, triples, tmp_path)
    assert {len(row["cosines"]) for row in rows} == {3}
    scores, _ = measured(model, Path(f"graded={graded},triples={triples}"), tmp_path)
    assert {"graded/pearson", "triples/ndcg@10"} <= scores.keys()


def test_the_loss_is_that_of_the_run(model: Path, pairs: Path, tmp_path: Path) -> None:
    """Summed over the widths that it was trained for."""
    whole = encoder(tmp_path, head="embedding", embedding_size=SIZE)
    prompts = {"query_prompt": "ask: ", "document_prompt": "text: "}
    losses = {}
    for sizes in ("12", "4", "12,4"):
        (whole / "settings.json").write_text(json.dumps({**prompts, "matryoshka_sizes": sizes}))
        losses[sizes] = measured(whole, pairs, tmp_path)[0]["loss"]
    assert losses["12,4"] == pytest.approx(losses["12"] + losses["4"])


def test_int8_weights_are_measured_as_the_model_is(pairs: Path, tmp_path: Path) -> None:
    model = encoder(tmp_path, head="embedding")
    loss = measured(model, pairs, tmp_path)[0]["loss"]
    arguments = {"model": model, "validation_file": pairs, "cache_dir": tmp_path / "cache"}
    before, after = quantize(flags_of("quantize", output=tmp_path / "int8", **arguments))
    assert before.loss == pytest.approx(loss, abs=1e-5) and after.loss == pytest.approx(loss, abs=0.1)
    (here,) = Model(model).embed(["a river"])
    (there,) = Model(tmp_path / "int8").embed(["a river"])
    assert here @ there > 0.99


def test_vectors_are_cut_and_of_length_1_again(model: Path, pairs: Path, tmp_path: Path, capsys: Any) -> None:
    whole = vectors_of(model, pairs, tmp_path / "whole.npz")
    cut = vectors_of(model, pairs, tmp_path / "cut.npz", truncate_dim=4)
    assert "matryoshka_sizes" not in capsys.readouterr().err
    np.testing.assert_allclose(cut, whole[:, :4] / np.linalg.norm(whole[:, :4], axis=1, keepdims=True), atol=1e-6)
    vectors_of(model, pairs, tmp_path / "other.npz", truncate_dim=5)
    assert "matryoshka_sizes" in capsys.readouterr().err


def test_a_text_is_cut_where_training_cuts_it(model: Path, tmp_path: Path, capsys: Any) -> None:
    long = write_rows(tmp_path / "long.jsonl", [{"text": "word " * 30}, {"text": "word " * 60}, {"text": "short"}])
    vectors = vectors_of(model, long, tmp_path / "long.npz")
    assert "--max_seq_len=40" in capsys.readouterr().out
    np.testing.assert_array_equal(vectors[0], vectors[1])


def test_hidden_states_are_still_there(model: Path, pairs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for vectors in ("token", "mean"):
        embed(flags_of("embed", model=model, input="hello", vectors=vectors, mixed_precision="no"))
        row = json.loads(capsys.readouterr().out)
        texts.append(np.array(row["vectors" if vectors == "token" else "vector"]))
    states, mean = texts
    assert states.shape == (5, 16)
    np.testing.assert_allclose(states.mean(0), mean, atol=1e-5)


@pytest.mark.parametrize(
    ("flags", "setting"),
    [
        ({"truncate_dim": SIZE + 1}, "truncate_dim"),
        ({"truncate_dim": 4, "vectors": "token"}, "truncate_dim"),
        ({"prompt_name": "query", "vectors": "mean"}, "prompt_name"),
    ],
)
def test_what_has_no_effect_is_refused(model: Path, flags: dict[str, Any], setting: str) -> None:
    with pytest.raises(UserError, match=f"^--{setting}"):
        embed(flags_of("embed", model=model, input="x", **flags))


@pytest.mark.parametrize("name", ["truncate_dim=4", "prompt_name=query", "query_prompt=q:"])
def test_other_models_have_no_such_settings(folder: Path, name: str) -> None:
    flag, _, value = name.partition("=")
    with pytest.raises(UserError, match=f"^--{flag}.*--head=embedding"):
        embed(flags_of("embed", model=folder, input="x", **{flag: value}))
