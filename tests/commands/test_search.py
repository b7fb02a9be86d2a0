"""What is most alike to queries, and hard negatives: exactly those that all cosines give, whatever the blocks are."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commands import corpus
from commands.search import search
from serving.model import Model
from settings.errors import DoesNotFit, UserError
from support.units import MIB
from tests.commands.small import encoder, flags_of, read_rows, write_rows
from tests.data.sources.rows import write_rows as write_table
from train_low_mem import main

pytestmark = pytest.mark.usefixtures("one_thread")
WORDS = [
    "river",
    "bridge",
    "water",
    "bread",
    "salt",
    "flour",
    "house",
    "door",
    "window",
    "tree",
    "leaf",
    "road",
    "car",
    "wheel",
]
Vectors = np.ndarray[Any, Any]


def phrases(count: int, seed: int) -> list[str]:
    choose = random.Random(seed)
    return [f"{' '.join(choose.choices(WORDS, k=3))} {number}" for number in range(count)]


TEXTS = phrases(700, 1)
QUESTIONS = phrases(9, 2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = encoder(tmp_path_factory.mktemp("model"), head="embedding", embedding_size=12, normalize=False)
    (folder / "settings.json").write_text(json.dumps({"query_prompt": "ask: ", "document_prompt": "text: "}))
    return folder


@pytest.fixture(scope="module")
def here(model: Path) -> Model:
    return Model(model, mixed_precision="no")


@pytest.fixture(scope="module")
def cosines(here: Model) -> Vectors:
    """Of all questions with all texts."""
    return directions(here, QUESTIONS, "query") @ directions(here, TEXTS, "document").T


def directions(here: Model, texts: list[str], prompt_name: str) -> Vectors:
    vectors = np.stack(here.embed(texts, prompt_name=prompt_name))
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "BLOCK_BYTES", 48 * 100)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus, in which each seventh text comes again."""
    rows = [{"id": f"t{number}", "text": text} for number, text in enumerate(TEXTS)]
    return write_rows(tmp_path_factory.mktemp("texts") / "texts.jsonl", [*rows, *rows[::7]])


def found(model: Path, queries: Any, texts: Path, folder: Path, **flags: Any) -> list[dict[str, Any]]:
    output = folder / "found.jsonl"
    folders = {"output": output, "cache_dir": folder / "cache", "overwrite": True}
    search(flags_of("search", model=model, input=queries, corpus=texts, mixed_precision="no", **{**folders, **flags}))
    return read_rows(output)


@pytest.mark.usefixtures("small_blocks")
def test_the_most_alike_of_all_texts_are_found_once_each(
    model: Path, texts: Path, cosines: Vectors, tmp_path: Path
) -> None:
    queries = write_rows(tmp_path / "queries.jsonl", ({"id": number, "query": q} for number, q in enumerate(QUESTIONS)))
    rows = found(model, queries, texts, tmp_path, num_documents=20)
    assert [(row["id"], row["query"]) for row in rows] == list(enumerate(QUESTIONS))
    for row, of_query in zip(rows, cosines, strict=True):
        best = np.argsort(-of_query)[:20]
        assert [document["text"] for document in row["documents"]] == [TEXTS[number] for number in best]
        assert [document["id"] for document in row["documents"]] == [f"t{number}" for number in best]
        np.testing.assert_allclose([document["score"] for document in row["documents"]], of_query[best], atol=1e-5)


def test_a_typed_query_is_answered_with_lines_and_the_corpus_is_read_once(
    model: Path, texts: Path, cosines: Vectors, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = {"model": model, "input": QUESTIONS[0], "corpus": texts, "cache_dir": tmp_path / "cache"}
    best = np.argsort(-cosines[0])[:3]
    for _ in range(2):
        search(flags_of("search", num_documents=3, mixed_precision="no", **flags))
        lines = capsys.readouterr().out.splitlines()
        assert [line.split("\t")[2] for line in lines] == [TEXTS[number] for number in best]
    (kept,) = (tmp_path / "cache" / "vectors").glob("*.arrow")
    kept.write_bytes(kept.read_bytes()[:100])  # A damaged one is made anew.
    search(flags_of("search", num_documents=3, mixed_precision="no", **flags))
    assert capsys.readouterr().out.splitlines() == lines


def interrupt(*arguments: Any, **options: Any) -> None:
    raise KeyboardInterrupt


def test_what_was_interrupted_is_continued(
    model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vectors of the corpus, and then what is found."""
    queries = write_rows(tmp_path / "queries.jsonl", ({"query": query} for query in QUESTIONS))
    expected = found(model, queries, texts, tmp_path / "whole")
    for cut, rows in (("pyarrow.OSFile", 800), ("shutil.copyfileobj", 9)):
        with monkeypatch.context() as patch:
            patch.setattr(cut, interrupt)
            with pytest.raises(KeyboardInterrupt, match=f"the same command continues after {rows} rows"):
                found(model, queries, texts, tmp_path, overwrite=False)
    assert found(model, queries, texts, tmp_path, overwrite=False) == expected


@pytest.mark.usefixtures("small_blocks")
def test_negatives_are_alike_and_belong_to_no_row_of_the_query(
    model: Path, texts: Path, here: Model, cosines: Vectors, tmp_path: Path
) -> None:
    """The first question has three positives, two in one row and one in another."""
    positives = [[TEXTS[3], TEXTS[4]], *([TEXTS[10 + number]] for number in range(1, 9))]
    rows = [{"query": q, "pos": of_query} for q, of_query in zip(QUESTIONS, positives, strict=True)]
    rows.append({"query": QUESTIONS[0], "pos": [TEXTS[50]]})
    queries = write_rows(tmp_path / "pairs.jsonl", rows)
    mined = found(model, queries, texts, tmp_path, num_negatives=5, relative_margin=0.1)
    known = {QUESTIONS[0]: {TEXTS[3], TEXTS[4], TEXTS[50]}}
    expected = []
    for row in rows:
        of_query = cosines[QUESTIONS.index(row["query"])]
        own = min(of_query[TEXTS.index(positive)] for positive in row["pos"])
        order = [TEXTS[number] for number in np.argsort(-of_query) if of_query[number] < own - abs(own) * 0.1]
        negatives = [text for text in order if text not in known.get(row["query"], set(row["pos"]))][:5]
        expected += [{"query": row["query"], "pos": positive, "neg": negatives} for positive in row["pos"] if negatives]
    assert mined == expected and len(mined) > 5


def test_mined_rows_are_trained_on(model: Path, texts: Path, tmp_path: Path, capsys: Any) -> None:
    """A file of pairs is its own corpus, by the column of its second texts."""
    pairs = ({"anchor": q, "positive": TEXTS[number]} for number, q in enumerate(TEXTS[100:130]))
    queries = write_rows(tmp_path / "pairs.jsonl", pairs)
    found(model, queries, queries, tmp_path, num_negatives=2)
    words = ["train", "--head=embedding", f"--finetune_from={model}", f"--train_file={tmp_path}/found.jsonl"]
    words += ["--max_steps=1", "--effective_batch_size=4", "--run_name=mined", "--mixed_precision=no"]
    words += [f"--{name}_dir={tmp_path / name}" for name in ("output", "log", "cache")]
    assert main(words) == 0, capsys.readouterr().err
    assert "query, pos, neg" in capsys.readouterr().out.replace(" -> ", ", ")


@pytest.mark.parametrize("ending", ["jsonl", "parquet", "csv"])
def test_each_text_of_a_list_is_one_of_the_corpus(model: Path, tmp_path: Path, ending: str) -> None:
    positives = [["water salt", "bread"], ["door", "wheel road"]]
    cells = [json.dumps(each) for each in positives] if ending == "csv" else positives
    rows = [{"query": q, "pos": cell} for q, cell in zip(QUESTIONS, cells, strict=False)]
    pairs = write_table(tmp_path / f"pairs.{ending}", rows)
    mined = found(model, pairs, pairs, tmp_path, num_negatives=3)
    for query, own in zip(QUESTIONS, positives, strict=False):
        others = {text for each in positives if each is not own for text in each}
        of_query = [row for row in mined if row["query"] == query]
        assert {row["pos"] for row in of_query} <= {*own}
        assert all({*row["neg"]} <= others for row in of_query)
    assert mined


def test_documents_may_be_in_another_column_than_positives(model: Path, texts: Path, tmp_path: Path) -> None:
    queries = write_rows(tmp_path / "pairs.jsonl", [{"q": QUESTIONS[0], "p": TEXTS[3]}])
    (row,) = found(model, queries, texts, tmp_path, num_negatives=2, text_column="q,p")
    assert row["pos"] == TEXTS[3] and {*row["neg"]} <= {*TEXTS} - {TEXTS[3]}


def test_the_corpus_is_not_written_over(model: Path, texts: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is read"):
        found(model, QUESTIONS[0], texts, tmp_path, output=texts)


@pytest.mark.parametrize(
    ("flags", "setting"),
    [
        ({"corpus": "missing.jsonl"}, "corpus"),
        ({"num_negatives": 2}, "num_negatives"),
        ({"truncate_dim": 13}, "truncate_dim"),
        ({"input": None}, "input"),
    ],
)
def test_what_is_wrong_is_named(model: Path, texts: Path, flags: dict[str, Any], setting: str, tmp_path: Path) -> None:
    settings = {"model": model, "input": "a text", "corpus": texts, "cache_dir": tmp_path, **flags}
    with pytest.raises(UserError, match=f"^--{setting}"):
        search(flags_of("search", **{name: value for name, value in settings.items() if value is not None}))


def test_rows_without_a_positive_are_named(model: Path, texts: Path, tmp_path: Path) -> None:
    queries = write_rows(tmp_path / "queries.jsonl", [{"query": "a", "other": "b"}])
    with pytest.raises(UserError, match="--text_column"):
        found(model, queries, texts, tmp_path, num_negatives=2)


def test_what_is_known_of_each_text_counts_to_the_budget(model: Path, texts: Path, tmp_path: Path) -> None:
    from memory.processes import ProcessTree

    with pytest.raises(DoesNotFit):
        found(model, "a text", texts, tmp_path, memory_budget=ProcessTree().usage().anon_bytes + 30 * MIB)
