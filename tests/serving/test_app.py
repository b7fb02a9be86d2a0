"""Who is let in, what is read, and what every address answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from starlette.testclient import TestClient

from model.decoding.answer_tree import AnswerTree
from serving.app import BODY_BYTES, Api
from tests.serving.served import NAME, Gate, alone, api_of, client_of, make_api, prompt_ids, settings, trained

pytestmark = pytest.mark.usefixtures("one_thread")
TOKEN = "a-token-of-some-length"
AWAY = "http://192.168.0.7:8400"
ADDRESSES = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("GET", "/v1/models"),
    ("GET", f"/v1/models/{NAME}"),
    ("POST", "/api/chat"),
    ("GET", "/metrics"),
]


@pytest.fixture(scope="module")
def api() -> Api:
    return make_api()


@pytest.fixture(scope="module")
def client(api: Api) -> Iterator[TestClient]:
    with client_of(api) as client:
        yield client


def post(client: TestClient, path: str, content: object, **headers: str) -> Any:
    return client.post(path, content=json.dumps(content), headers={"Content-Type": "application/json", **headers})


def chat(client: TestClient, text: str = "hello", **fields: Any) -> Any:
    return post(client, "/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **fields})


@pytest.mark.parametrize(
    ("headers", "status", "kind"),
    [
        ({"Host": "127.0.0.1.evil.example"}, 421, "invalid_request_error"),
        ({"Origin": "http://127.0.0.1:9"}, 403, "permission_error"),
    ],
)
def test_requests_of_other_sites_are_refused(
    client: TestClient, headers: dict[str, str], status: int, kind: str
) -> None:
    answer = post(client, "/v1/chat/completions", {}, **headers)
    assert answer.status_code == status and answer.json()["error"]["type"] == kind


def test_the_key_opens_and_health_alone_needs_none() -> None:
    with client_of(make_api(), TOKEN, AWAY) as client:
        wrong = [{}, {"Authorization": TOKEN}, {"Authorization": "Bearer x"}, {"Cookie": f"frugalt5_token={TOKEN}"}]
        for (method, path), headers in product(ADDRESSES, wrong):
            address = f"{path}?token={TOKEN}"
            answer = client.request(method, address, headers={"Content-Type": "application/json", **headers})
            assert answer.status_code == 401 and answer.json()["error"]["type"] == "authentication_error"
            assert answer.headers["www-authenticate"] == "Bearer"
        assert client.get("/health").json() == {"status": "ok"}
        key = {"Authorization": f"Bearer {TOKEN}"}
        assert client.get("/v1/models", headers=key).status_code == 200
        assert post(client, "/api/chat", {"input_txt": "<extra_id_0>x"}, **key).json() == {
            "response": alone(prompt_ids("<extra_id_0>x"))
        }


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"[]", 400), (b"\xff\xfe", 400), (b'{"a":' * 50_000, 400), (b"x" * (BODY_BYTES + 1), 413), (b"{}", 406)],
)
def test_bodies_that_are_none_are_refused(client: TestClient, body: bytes, status: int) -> None:
    answer = client.post("/api/chat", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == status and answer.json()["error"]["message"]


def test_a_body_that_never_ends_is_cut_off(client: TestClient, api: Api) -> None:
    sent = 0

    def parts() -> Iterator[bytes]:
        nonlocal sent
        while sent < 100 * BODY_BYTES:
            sent += 65536
            yield b" " * 65536

    answer = client.post("/v1/completions", content=parts(), headers={"Content-Type": "application/json"})
    assert answer.status_code == 413


def test_bodies_that_are_read_at_once_share_a_room(client: TestClient, api: Api) -> None:
    """It is told before anything is read, and is free again behind each, answered or refused."""
    free = api.bodies.free_bytes
    with api.bodies.reserve(free - 50):
        refused = chat(client, "x" * 100)
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
        parts = client.post("/v1/completions", content=iter([b"{}"]), headers={"Content-Type": "application/json"})
        assert parts.status_code == 429, "one that does not say how long it is may be of the longest"
        assert post(client, "/api/chat", {}).status_code == 406, "a short one has room"
    assert chat(client, "x" * 100).status_code == 400 and chat(client).status_code == 200
    assert api.bodies.free_bytes == free


def test_too_many_are_told_when_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    api = make_api(queue_limit=1, generate_batch_size=1)
    gate = Gate(api, monkeypatch)
    with client_of(api) as client, ThreadPoolExecutor(1) as beside:
        first = beside.submit(chat, client)
        assert gate.reached.wait(60)
        refused = chat(client, n=2)
        gate.may_go.set()
        assert (
            first.result().status_code == 200
            and refused.status_code == 429
            and int(refused.headers["retry-after"]) >= 1
        )
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert chat(client).status_code == 200


def test_what_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    api = replace(make_api(), seconds=0.01)
    gate = Gate(api, monkeypatch)
    with client_of(api) as client:
        answer = chat(client)
        assert "not answered within 0.01 seconds" in answer.text
        assert answer.status_code == 504
        gate.may_go.set()


def test_answers_come_from_a_list() -> None:
    """Whatever length, penalty or stop text a request asks for."""
    texts = ["red", "blue", "a longer answer"]
    tokenizer = trained().tokenizer
    tree = AnswerTree.build(iter(tokenizer.encode_prompts(texts)), tokenizer.eos_id)
    listed = api_of(replace(trained(), tree=tree), settings())
    with client_of(listed) as client:
        for how in ({}, {"temperature": 1.5, "n": 3}, {"max_tokens": 1, "stop": ["e"], "repetition_penalty": 2.0}):
            choices = chat(client, **how).json()["choices"]
            assert {choice["message"]["content"] for choice in choices} <= set(texts)
            assert {choice["finish_reason"] for choice in choices} == {"stop"}
