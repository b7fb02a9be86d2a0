"""The real client of OpenAI's API, over the loopback."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from serving.app import Api, make_app
from support.web.listening import listen, server_of
from tests.serving.served import NAME, Gate, alone, make_api, prompt_ids

if TYPE_CHECKING:  # A test that needs it imports it: half a second while tests are collected.
    import openai

pytestmark = pytest.mark.usefixtures("one_thread")
QUESTION = [{"role": "user", "content": "hello"}]
TOKEN = "a-token-of-some-length"


class Served:
    """An API at a real port."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self._listener = listen("127.0.0.1", 0)
        self.port = self._listener.getsockname()[1]
        self._server = server_of(make_app(api, TOKEN), 1)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._listener]})
        self._thread.start()

    def client(self, key: str = TOKEN) -> openai.OpenAI:
        import openai

        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key=key, max_retries=0)

    def end(self) -> None:
        self._server.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive() and not self.api.engine._thread.is_alive()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    served = Served(make_api())
    yield served
    served.end()


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with served.client() as client:
        yield client


def chat(client: openai.OpenAI, **how: Any) -> Any:
    return client.chat.completions.create(model=NAME, messages=QUESTION, **how)  # type: ignore[call-overload]


def test_a_request_that_outlasts_the_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import openai

    api = make_api(max_new_tokens=60000)
    gate = Gate(api, monkeypatch)
    gate.may_go.set()
    served = Served(api)
    with ThreadPoolExecutor(1) as beside, served.client() as client:
        answer = beside.submit(chat, client)
        assert gate.reached.wait(60)
        served.end()
        with pytest.raises(openai.APIStatusError) as refused:
            answer.result(60)
    assert refused.value.status_code == 503


def test_chat(client: openai.OpenAI) -> None:
    answer = chat(client, max_tokens=9)
    (choice,) = answer.choices
    assert (answer.object, answer.model, choice.message.role) == ("chat.completion", NAME, "assistant")
    assert choice.message.content == alone(prompt_ids("hello"), max_new_tokens=9) and choice.finish_reason == "length"
    assert answer.usage.model_dump(include={"prompt_tokens", "completion_tokens", "total_tokens"}) == {
        "prompt_tokens": 6,
        "completion_tokens": 9,
        "total_tokens": 15,
    }


def test_streamed_chat(client: openai.OpenAI) -> None:
    how: dict[str, Any] = {"temperature": 1.0, "seed": 3}
    n = 3
    texts, ends, usage = [""] * n, [None] * n, None
    for chunk in chat(client, stream=True, stream_options={"include_usage": True}, n=n, **how):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ends[choice.index] = choice.finish_reason or ends[choice.index]
    assert texts == [alone(prompt_ids("hello"), temperature=1.0, seed=3 + number) for number in range(n)]
    assert all(end in ("stop", "length") for end in ends) and usage is not None and usage.prompt_tokens == 6


def test_completions(client: openai.OpenAI) -> None:
    whole = alone(prompt_ids("x"))
    assert client.completions.create(model=NAME, prompt="x").choices[0].text == whole
    streamed = client.completions.create(model=NAME, prompt="x", stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == whole


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    import openai

    with pytest.raises(openai.BadRequestError) as raised:
        chat(client, extra_body={"min_p": 0.5})
    assert raised.value.param == "min_p" and raised.value.type == "invalid_request_error"


def test_a_wrong_key_and_a_wrong_model(served: Served, client: openai.OpenAI) -> None:
    import openai

    with served.client("wrong") as stranger, pytest.raises(openai.AuthenticationError):
        chat(stranger)
    for ask in (
        lambda: client.models.retrieve("other"),
        lambda: client.completions.create(model="other", prompt="x"),
        lambda: client.embeddings.create(model="other", input="x"),
    ):
        with pytest.raises(openai.NotFoundError) as raised:
            ask()
        assert (raised.value.code, raised.value.param) == ("model_not_found", "model")


def test_a_client_that_leaves_ends_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    api, has_left = make_api(), threading.Event()
    gate = Gate(api, monkeypatch)
    monkeypatch.setattr(api.engine.meters.request_seconds, "add", lambda seconds: has_left.set())
    served = Served(api)
    path, body = b"/v1/completions", b'{"prompt": "hello", "stream": true}'
    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        connection.sendall(
            b"POST %s HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %s\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (path, TOKEN.encode(), len(body), body)
        )
        assert gate.reached.wait(60)
    assert has_left.wait(60)
    gate.may_go.set()
    served.end()
    assert sum(gate.rows) == 1 and api.engine.meters.abandoned == 1, "no step was taken for it any more"
