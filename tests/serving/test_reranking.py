"""Documents by their relevance, as Cohere, Jina and vLLM have it: the scores of `rerank`, best first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from commands.answering import find_answering
from commands.generate import LEAST_TEXT
from commands.rerank import rerank
from serving.app import Api
from serving.server import api_of
from settings.loading import load
from support.web.bodies import ByteBudget
from tests.commands.small import flags_of, read_rows, write_rows
from tests.serving import served
from tests.serving.served import client_of, settings, trained
from tests.training.small_trained import SHAPE, save_trained

pytestmark = pytest.mark.usefixtures("one_thread")
QUERY = "where does it end"
DOCUMENTS = ["in the sea", {"text": "at a wall", "id": 7}, "d" * 100, "in the sea"]


def api_with(answers: tuple[str, str] | None) -> Api:
    config = settings()
    return api_of(trained(), config.data, config.generate, answers=answers)


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with client_of(api_with(("true", "false"))) as client:
        yield client


def ask(client: TestClient, **fields: Any) -> Any:
    return client.post("/v1/rerank", json={"query": QUERY, "documents": DOCUMENTS, **fields})


def ranked(model: Path, folder: Path, **flags: Any) -> list[dict[str, Any]]:
    """The results of the command for the same documents."""
    source = write_rows(folder / "rows.jsonl", [{"query": QUERY, "documents": DOCUMENTS}])
    output = folder / "out.jsonl"
    given = {"input": source, "output": output, "mixed_precision": "no", "cache_dir": folder / "cache", **flags}
    rerank(flags_of("rerank", model=model, **given))
    results: list[dict[str, Any]] = read_rows(output)[0]["results"]
    return results


def test_results_are_those_of_the_command(client: TestClient, tmp_path: Path) -> None:
    """Scores are probabilities, and a document that is too long is cut."""
    expected = ranked(served.folder(), tmp_path, max_seq_len=64)
    answer = ask(client).json()
    assert [one["index"] for one in answer["results"]] == [one["index"] for one in expected]
    scores = [one["relevance_score"] for one in answer["results"]]
    assert scores == pytest.approx(np.exp([one["score"] for one in expected]).tolist(), abs=2e-6)
    for one in answer["results"]:
        sent = DOCUMENTS[one["index"]]
        assert one["document"] == ({"text": sent} if isinstance(sent, str) else sent)
    lengths = [len(f"Query: {QUERY} Document: {text} Relevant:") + 1 for text in ("in the sea", "at a wall")]
    assert answer["model"] == served.NAME and answer["usage"]["total_tokens"] == 2 * lengths[0] + lengths[1] + 64


def test_as_many_are_given_as_are_asked_for(client: TestClient) -> None:
    whole = ask(client).json()["results"]
    assert ask(client, top_n=2).json()["results"] == whole[:2]
    assert ask(client, top_n=0).json()["results"] == ask(client, top_n=99).json()["results"] == whole
    bare = ask(client, return_documents=False).json()["results"]
    assert [one.keys() for one in bare] == [{"index", "relevance_score"}] * 4
    cut = ask(client, max_tokens_per_doc=3, documents=["in the sea", "in a house"]).json()["results"]
    assert cut[0]["relevance_score"] == cut[1]["relevance_score"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"query": " "}, "query"),
        ({"query": None}, "query"),
        ({"query": "q" * 60}, "query"),
        ({"query": "q" * 100_000}, "query"),
        ({"documents": []}, "documents"),
        ({"documents": "a text"}, "documents"),
        ({"documents": ["a", 7]}, "documents"),
        ({"documents": [{"title": "a"}]}, "documents"),
        ({"documents": ["a"] * 2049}, "documents"),
        ({"top_n": -1}, "top_n"),
        ({"return_documents": "yes"}, "return_documents"),
        ({"return_document": False}, "return_document"),
    ],
)
def test_what_is_wrong_is_named(client: TestClient, fields: dict[str, Any], param: str) -> None:
    answer = ask(client, **fields)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_more_documents_than_the_memory_of_requests_holds_are_refused() -> None:
    api = api_with(("true", "false"))
    api.memory = ByteBudget(2**17)
    with client_of(api) as client:
        refused = ask(client, documents=["a text"] * 500)
        assert refused.status_code == 413 and refused.json()["error"]["param"] == "documents"
        assert ask(client, documents=["a text"] * 5).status_code == 200
        assert api.memory.free_bytes == api.memory.total_bytes


def test_a_model_without_two_answers_ranks_nothing() -> None:
    with client_of(api_with(None)) as client:
        assert ask(client).status_code == 404
        assert "/v1/rerank" not in client.get("/v1/models").json()["data"][0]["endpoints"]


@pytest.mark.parametrize(("labels", "ranks"), [("regression", True), ("no,yes", True), ("a,b,c", False)])
def test_a_head_ranks_by_its_number_or_its_second_class(tmp_path: Path, labels: str, ranks: bool) -> None:
    shape = replace(SHAPE, num_decoder_layers=0, head="sequence", labels=labels)
    folder = save_trained(tmp_path / "head", shape=shape)
    answering = find_answering(load("serve", {"model": str(folder), "mixed_precision": "no"}), "serve")
    with client_of(served.api_of(answering.load(LEAST_TEXT), answering.config)) as client:
        if not ranks:
            assert ask(client).status_code == 404
            return
        expected = ranked(folder, tmp_path)
        results = ask(client).json()["results"]
        assert [one["index"] for one in results] == [one["index"] for one in expected]
        scores = [one["relevance_score"] for one in results]
        assert scores == pytest.approx([one["score"] for one in expected], abs=2e-6)
        assert client.get("/v1/models").json()["data"][0]["endpoints"][-1] == "/v1/rerank"
