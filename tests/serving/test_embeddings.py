"""Vectors in OpenAI's words: those that `embed` writes, beside answers or from an encoder."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from commands.answering import find_answering
from commands.generate import LEAST_TEXT
from commands.text_reader import Embedder
from serving.asking import OPEN_BYTES
from serving.model import Model
from settings.loading import load
from support.web.bodies import ByteBudget
from tests.serving.served import api_of, client_of, make_api, settings, trained
from tests.training.small_trained import SHAPE, save_trained

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with client_of(make_api()) as client:
        yield client


def ask(client: TestClient, value: Any, **fields: Any) -> Any:
    return client.post("/v1/embeddings", json={"input": value, **fields})


def test_vectors_are_those_of_embed(client: TestClient) -> None:
    expected = Embedder(trained(), settings().data).embed(["hello", "a longer text"])
    result = ask(client, ["hello", "a longer text"]).json()
    assert result["object"] == "list" and [one["index"] for one in result["data"]] == [0, 1]
    for one, vector in zip(result["data"], expected, strict=True):
        np.testing.assert_allclose(one["embedding"], vector, atol=1e-6)
    assert result["usage"] == {"prompt_tokens": 20, "total_tokens": 20}
    packed = ask(client, "hello", encoding_format="base64").json()["data"][0]["embedding"]
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(packed), "<f4"), expected[0], atol=1e-6)
    ids = trained().tokenizer.encode_batch(["hello"])[0].tolist()
    np.testing.assert_allclose(ask(client, ids).json()["data"][0]["embedding"], expected[0], atol=1e-6)


@pytest.mark.parametrize(
    ("value", "fields"),
    [
        ("", {}),
        ("x" * 100, {}),
        ("a", {"dimensions": 3}),
    ],
)
def test_what_is_wrong_is_named(client: TestClient, value: Any, fields: dict[str, Any]) -> None:
    answer = ask(client, value, **fields)
    assert answer.status_code == 400 and answer.json()["error"]["param"] in ("input", *fields)


def test_more_texts_than_the_memory_of_requests_holds_are_refused_with_how_many_fit() -> None:
    api = make_api(queue_limit=1, generate_batch_size=1)
    api.memory = ByteBudget(2 * OPEN_BYTES)
    with client_of(api) as client:
        refused = ask(client, ["a text"] * 500)
        assert refused.status_code == 413 and refused.json()["error"]["param"] == "input"
        fitting = int(re.findall(r"are 500 texts; (\d+) like these fit", refused.json()["error"]["message"])[0])
        assert len(ask(client, ["a text"] * fitting).json()["data"]) == fitting > 50
        with api.memory.reserve(OPEN_BYTES):
            assert ask(client, ["a text"] * fitting).status_code == 429
        assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 200
        assert api.memory.free_bytes == api.memory.total_bytes


@pytest.mark.parametrize(("head", "labels"), [("sequence", "few,many"), ("token", "C,E,H")])
def test_a_head_over_labels_classifies(tmp_path: Path, head: str, labels: str) -> None:
    folder = save_trained(tmp_path / "head", shape=replace(SHAPE, num_decoder_layers=0, head=head, labels=labels))
    answering = find_answering(load("serve", {"model": str(folder), "mixed_precision": "no"}), "serve")
    expected = Model(folder, mixed_precision="no").answer(["MKVL", "a b"])
    with client_of(api_of(answering.load(LEAST_TEXT), answering.config)) as client:
        result = client.post("/v1/classify", json={"input": ["MKVL", "a b"]}).json()
        assert [one["index"] for one in result["data"]] == [0, 1]
        for one, columns in zip(result["data"], expected, strict=True):
            assert one.keys() == {"index", *columns}
            label = next(iter(columns))
            assert one[label] == (pytest.approx(columns[label]) if label == "number" else columns[label])
        assert client.post("/v1/classify", json={"input": ["x", ""]}).status_code == 400
        assert client.post("/v1/classify", json={"input": [1]}).status_code == 400
        assert client.get("/v1/models").json()["data"][0]["endpoints"][:2] == ["/v1/classify", "/v1/embeddings"]
        for path in ("/v1/chat/completions", "/v1/completions", "/api/chat"):
            refused = client.post(path, json={})
            assert refused.status_code == 404 and "/v1/classify or /v1/embeddings" in refused.text


def test_an_embedding_head_gives_its_vectors_with_either_prompt_and_cut(tmp_path: Path) -> None:
    shape = replace(SHAPE, num_decoder_layers=0, head="embedding", embedding_size=12)
    folder = save_trained(tmp_path / "head", shape=shape)
    (folder / "settings.json").write_text('{"query_prompt": "ask: ", "document_prompt": "text: ", "max_seq_len": 32}')
    config = load("serve", {"model": str(folder), "mixed_precision": "no"})
    answering = find_answering(config, "serve")
    here = Model(folder, mixed_precision="no")
    texts = ["a river", "a longer text"]
    with client_of(api_of(answering.load(LEAST_TEXT), answering.config)) as client:
        assert client.get("/v1/models").json()["data"][0]["endpoints"] == ["/v1/embeddings"]
        for fields, name in (({}, "document"), ({"prompt_name": "query"}, "query"), ({"input_type": "query"}, "query")):
            vectors = [one["embedding"] for one in ask(client, texts, **fields).json()["data"]]
            np.testing.assert_allclose(vectors, here.embed(texts, prompt_name=name), atol=1e-6)
        (cut,) = Model(folder, mixed_precision="no", truncate_dim=4).embed(texts[:1])
        packed = ask(client, texts[0], dimensions=4, encoding_format="base64").json()["data"][0]["embedding"]
        np.testing.assert_allclose(np.frombuffer(base64.b64decode(packed), "<f4"), cut, atol=1e-6)
        for fields in ({"dimensions": 13}, {"prompt_name": "passage"}):
            assert ask(client, texts, **fields).json()["error"]["param"] in fields
        assert ask(client, "x" * 32).json()["error"]["code"] == "context_length_exceeded"


def test_other_models_have_no_prompts(client: TestClient) -> None:
    assert ask(client, "a", prompt_name="query").json()["error"]["param"] == "prompt_name"
