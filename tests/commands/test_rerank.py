"""Documents ranked for queries: by a T5 that says "true" or "false", and by heads of numbers and of two classes."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch

from commands.generate import generate
from commands.rerank import rerank
from memory.processes import ProcessTree
from model import hf_format
from model.t5 import T5
from settings.errors import DoesNotFit, UserError
from support.units import MIB
from tests.commands.small import encoder, flags_of, read_rows, write_rows
from tests.data.tokenizers.models import folder_of, sentencepiece_model
from tests.measuring import in_child
from tests.training.small_trained import SHAPE

pytestmark = pytest.mark.usefixtures("one_thread")
Screen = pytest.CaptureFixture[str]
DOCUMENTS = ["The river ends in the sea.", "x", "bread is baked " * 3, "河流入海", "The river ends in the sea."]
ROW = {"id": 7, "query": "where does the river end", "documents": DOCUMENTS}


def ranked(model: Path, output: Path, rows: list[dict[str, Any]], **flags: Any) -> list[dict[str, Any]]:
    """The rows that are written for rows."""
    return ranked_file(model, write_rows(output.parent / "rows.jsonl", rows), output, overwrite=True, **flags)


def ranked_file(model: Path, source: Path, output: Path, **flags: Any) -> list[dict[str, Any]]:
    """The rows that are written for a file."""
    given = {"cache_dir": output.parent / "cache", "mixed_precision": "no", **flags}
    rerank(flags_of("rerank", model=model, input=source, output=output, **given))
    return read_rows(output)


def scores_of(row: dict[str, Any]) -> list[float]:
    """The scores of the documents in the order of the input."""
    return [result["score"] for result in sorted(row["results"], key=lambda result: result["index"])]


def test_a_t5_scores_by_the_probability_of_true_against_false(folder: Path, tmp_path: Path) -> None:
    """As `generate` does with the list of these two answers."""
    row, _ = ranked(folder, tmp_path / "out.jsonl", [ROW, {"query": "q", "documents": []}], max_seq_len=512)
    prompts = [{"prompt": f"Query: {ROW['query']} Document: {document} Relevant:"} for document in DOCUMENTS]
    given = {
        "model": folder,
        "input": write_rows(tmp_path / "prompts.jsonl", prompts),
        "output": tmp_path / "answers.jsonl",
        "answers": "true,false",
        "num_answers": 2,
        "num_beams": 2,
        "mixed_precision": "no",
        "cache_dir": tmp_path / "cache",
    }
    generate(flags_of("generate", **given))
    expected = [
        dict(zip(answer["responses"], answer["log_probabilities"], strict=True))["true"]
        for answer in read_rows(tmp_path / "answers.jsonl")
    ]
    assert scores_of(row) == pytest.approx(expected, abs=2e-6)
    assert len(set(expected)) == 4, "the documents are told apart"


def test_documents_come_best_first_and_rows_keep_their_columns(folder: Path, tmp_path: Path) -> None:
    (row,) = ranked(folder, tmp_path / "out.jsonl", [ROW])
    assert list(row) == ["query", "id", "results"] and row["id"] == 7
    scores = [result["score"] for result in row["results"]]
    assert scores == sorted(scores, reverse=True)
    assert all(result["document"] == DOCUMENTS[result["index"]] for result in row["results"])
    order = [result["index"] for result in row["results"]]
    assert sorted(order) == list(range(5)) and order.index(0) == order.index(4) - 1, "equal ones in their order"
    flat = [{"query": ROW["query"], "document": {"text": text}, "score": at} for at, text in enumerate(DOCUMENTS)]
    lines = ranked(folder, tmp_path / "flat.jsonl", flat)
    assert [line["rank"] for line in lines] == [1, 2, 3, 4, 5]
    assert [line["score_reference"] for line in lines] == order
    assert [line["score"] for line in lines] == scores


@pytest.mark.parametrize(("labels", "column"), [("regression", "number"), ("no,yes", "probabilities")])
def test_a_head_scores_by_its_number_or_its_second_class(tmp_path: Path, labels: str, column: str) -> None:
    """As `generate` gives them for the text of query and document."""
    model = encoder(tmp_path, head="sequence", labels=labels)
    (row,) = ranked(model, tmp_path / "out.jsonl", [ROW])
    texts = [{"text": f"Query: {ROW['query']} Document: {document}"} for document in DOCUMENTS]
    output = tmp_path / "labels.jsonl"
    source = write_rows(tmp_path / "texts.jsonl", texts)
    generate(flags_of("generate", model=model, input=source, output=output, mixed_precision="no"))
    answers = [answer[column] for answer in read_rows(output)]
    expected = [answer["yes"] for answer in answers] if column == "probabilities" else answers
    assert scores_of(row) == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize("labels", [None, "regression"])
def test_scores_do_not_depend_on_the_documents_beside(folder: Path, tmp_path: Path, labels: str | None) -> None:
    model = folder if labels is None else encoder(tmp_path, head="sequence", labels=labels)
    (together,) = ranked(model, tmp_path / "out.jsonl", [ROW], eval_batch_size_per_gpu=5)
    (one_by_one,) = ranked(model, tmp_path / "out.jsonl", [ROW], eval_batch_size_per_gpu=1)
    assert scores_of(together) == pytest.approx(scores_of(one_by_one), abs=2e-6)


def test_other_words_may_be_the_answers(folder: Path, tmp_path: Path) -> None:
    """The first one is that of a relevant document; both may begin alike."""
    scores = {
        answers: scores_of(ranked(folder, tmp_path / "out.jsonl", [ROW], answers=answers)[0])
        for answers in ("true,false", "false,true", "no,not")
    }
    for relevant, other in zip(scores["true,false"], scores["false,true"], strict=True):
        both = torch.tensor([relevant, other]).exp().sum()
        assert float(both) == pytest.approx(1, abs=1e-5)
    assert all(score < 0 for score in scores["no,not"])
    with pytest.raises(UserError, match=r"^--answers = a,b,c, has 3 answers"):
        ranked(folder, tmp_path / "out.jsonl", [ROW], answers="a,b,c")


def test_the_list_in_a_models_folder_counts(folder: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(folder, tmp_path / "model"))
    (model / "answers.txt").write_text("yes\nno\n")
    (own,) = ranked(model, tmp_path / "out.jsonl", [ROW])
    (named,) = ranked(folder, tmp_path / "out.jsonl", [ROW], answers="yes,no")
    assert scores_of(own) == scores_of(named)


def figures(text: str) -> dict[str, float]:
    return {name: float(number) for name, number in re.findall(r"(\S+) (\d+\.\d\d)\b", text)}


def test_rankings_are_scored_where_relevance_is_known(folder: Path, tmp_path: Path, capsys: Screen) -> None:
    (row,) = ranked(folder, tmp_path / "out.jsonl", [ROW])
    second = row["results"][1]["index"]
    capsys.readouterr()
    unknown = {"query": "q", "documents": ["a"]}
    none = {"query": "q", "documents": ["a"], "relevant": []}
    ranked(folder, tmp_path / "out.jsonl", [{**ROW, "relevant": [second]}, unknown, none])
    text = capsys.readouterr().out
    expected = {"MRR": 50.0, "nDCG@10": 63.09, "recall@1": 0.0, "recall@5": 100.0, "recall@10": 100.0}
    assert figures(text) == expected and "queries: 1" in text
    flat = [{"query": "q", "document": text, "label": at == second} for at, text in enumerate(DOCUMENTS)]
    lines = ranked(folder, tmp_path / "flat.jsonl", flat)
    rank = next(line["rank"] for line in lines if line["label"])
    assert figures(capsys.readouterr().out)["MRR"] == pytest.approx(100 / rank, abs=0.01)


def test_an_interrupted_file_is_continued(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Screen
) -> None:
    """With the rows and the figures of one that was not."""
    rows = [
        {"query": f"query {at}", "documents": [f"d{number * at}" for number in range(130)], "relevant": [at]}
        for at in range(8)
    ]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    whole = ranked_file(folder, source, tmp_path / "whole.jsonl")
    expected = figures(capsys.readouterr().out)
    writes = iter(range(8))

    def interrupted(handle: int) -> None:
        if next(writes) == 7:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupted)
        with pytest.raises(KeyboardInterrupt, match=r"the same command continues after [246] rows"):
            ranked_file(folder, source, tmp_path / "cut.jsonl")
    assert not (tmp_path / "cut.jsonl").exists()
    capsys.readouterr()
    with pytest.raises(UserError, match="another model, input or settings"):
        ranked_file(folder, source, tmp_path / "cut.jsonl", answers="false,true")
    assert ranked_file(folder, source, tmp_path / "cut.jsonl") == whole
    text = capsys.readouterr().out
    assert figures(text) == expected and "already done" in text
    assert not list(tmp_path.glob("*.unfinished"))


def test_cut_documents_bad_rows_and_rows_apart_are_told(folder: Path, tmp_path: Path, capsys: Screen) -> None:
    rows = [
        {"query": "q", "document": "d" * 100},
        {"query": "q", "document": None},
        {"query": "r", "document": "x"},
        {"query": "q", "document": "y"},
    ]
    lines = ranked(folder, tmp_path / "out.jsonl", rows, max_seq_len=64, skip_bad_rows=True)
    assert [line["rank"] for line in lines] == [1, 1, 1]
    text = capsys.readouterr().out
    assert "truncated to --max_seq_len=64: 1 document" in text
    assert "left out: 1 row" in text and "line 4" in text
    with pytest.raises(UserError, match="line 2"):
        ranked(folder, tmp_path / "out.jsonl", rows)


def test_what_cannot_be_ranked_is_refused(folder: Path, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", [ROW])
    for value in (None, "a text"):
        flags = {} if value is None else {"input": value}
        with pytest.raises(UserError, match=r"^--input"):
            rerank(flags_of("rerank", model=folder, **flags))
    several = encoder(tmp_path / "several", head="sequence", labels="a,b,c")
    for model in (several, encoder(tmp_path / "token", head="token", labels="a,b"), encoder(tmp_path / "none")):
        with pytest.raises(UserError, match=r"^--model"):
            rerank(flags_of("rerank", model=model, input=source))
    regression = encoder(tmp_path / "one", head="sequence", labels="regression")
    with pytest.raises(UserError, match=r"^--answers"):
        rerank(flags_of("rerank", model=regression, input=source, answers="true,false"))


def test_without_an_output_lines_are_printed(folder: Path, tmp_path: Path, capsys: Screen) -> None:
    expected = ranked(folder, tmp_path / "out.jsonl", [ROW])
    capsys.readouterr()
    flags = {"mixed_precision": "no", "cache_dir": tmp_path / "cache"}
    rerank(flags_of("rerank", model=folder, input=tmp_path / "rows.jsonl", **flags))
    (tmp_path / "screen.jsonl").write_text(capsys.readouterr().out, encoding="utf8")
    assert read_rows(tmp_path / "screen.jsonl") == expected


def test_a_document_that_no_budget_holds_is_refused(tmp_path: Path) -> None:
    model = encoder(tmp_path, head="sequence", labels="regression")
    rows = [{"query": "q", "documents": ["word " * 10_000]}]
    with pytest.raises(DoesNotFit, match="--max_seq_len"):
        ranked(model, tmp_path / "out.jsonl", rows, memory_budget=ProcessTree().usage().anon_bytes + 60 * MIB)


def test_memory_does_not_grow_with_the_number_of_documents(folder: Path, tmp_path: Path) -> None:
    documents = [f"{number} " + "d" * 20_000 for number in range(10)]
    for name, count in (("few", 2), ("many", 40)):
        write_rows(tmp_path / f"{name}.jsonl", ({"query": f"q{at}", "documents": documents} for at in range(count)))
    code = """
import contextlib
from commands.rerank import rerank
from config import load

model, few, many, cache = sys.argv[1:]
how = {"model": model, "mixed_precision": "no", "max_seq_len": "64", "cache_dir": cache}
with contextlib.redirect_stdout(sys.stderr):
    rerank(load("rerank", {**how, "input": few, "output": few + ".out"}))
    taken = measure(lambda: rerank(load("rerank", {**how, "input": many, "output": many + ".out"})))
print(taken)
"""
    paths = (tmp_path / "few.jsonl", tmp_path / "many.jsonl", tmp_path / "cache")
    (used_bytes,) = in_child(code, folder, *paths)
    assert used_bytes < 24 * MIB, "the documents are 8 MB, and the ids of their tokens 200 MB"
    assert len(read_rows(tmp_path / "many.jsonl.out")) == 40


@pytest.mark.slow
@pytest.mark.parametrize("shape", [{}, {"tie_word_embeddings": False, "scale_decoder_outputs": False}])
def test_scores_are_those_of_monot5_in_transformers(tmp_path: Path, shape: dict[str, Any]) -> None:
    """With a folder as T5's are published, and its tokens of "true" and "false"."""
    transformers = pytest.importorskip("transformers")
    text = "Query: where does the river end Document: in the sea true false Relevant:"
    words = text.split()
    proto = sentencepiece_model([" ".join(words[at:] + words[:at]) for at in range(len(words))] * 9, 120)
    reference = sentencepiece.SentencePieceProcessor(model_proto=proto)
    relevant, other = (reference.piece_to_id(piece) for piece in ("▁true", "▁false"))
    assert reference.unk_id() not in (relevant, other)
    model = folder_of(tmp_path / "model", proto, {})
    vocab_size = reference.get_piece_size() + 100  # T5's sentinels.
    hf_format.save(T5(replace(SHAPE, vocab_size=vocab_size, **shape)).initialise(5), model)
    documents = ["in the sea", "in the river", "where does it end " * 9]
    (row,) = ranked(model, tmp_path / "out.jsonl", [{"query": "where is the sea", "documents": documents}])
    peer = transformers.AutoModelForSeq2SeqLM.from_pretrained(model).eval()
    expected = []
    for document in documents:
        prompt = f"Query: where is the sea Document: {document} Relevant:"
        ids = [*reference.encode(prompt), reference.eos_id()]
        start = torch.tensor([[peer.config.decoder_start_token_id]])
        with torch.no_grad():
            logits = peer(input_ids=torch.tensor([ids]), decoder_input_ids=start).logits[0, 0, [other, relevant]]
        expected.append(float(torch.log_softmax(logits, 0)[1]))
    assert scores_of(row) == pytest.approx(expected, abs=1e-5)
    assert len(set(scores_of(row))) == 3
