"""What the API is opened with: its address, its key, what it tells, and what is refused before a model is loaded."""

from __future__ import annotations

import socket

import pytest

from common.language import speak
from model import hf_format
from serving.server import _greeting, serve
from settings.errors import UserError
from tests.serving.served import make_api, settings, trained


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    trained()
    monkeypatch.setattr(hf_format, "load", lambda *_, **__: pytest.fail("the model is loaded"))


def test_a_port_that_is_taken_is_told_before_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(UserError, match=f"--port = {port}, cannot be listened at"):
            serve(settings(port=port))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.7"])
def test_others_are_never_let_in_without_a_key(host: str) -> None:
    with pytest.raises(UserError, match=r"--token = none, would let anybody .* use this model"):
        serve(settings(host=host, token="none"))
    with pytest.raises(UserError, match="shorter than 12"):
        serve(settings(host=host, token="short"))


def test_the_start_tells_what_fits_and_the_key() -> None:
    api = make_api(memory_budget="2G")
    lines = _greeting(api, trained(), "http://box:8400", "the-key-of-this")
    assert "small at http://box:8400/v1" in lines[0] and "64 concurrent answers" in lines[1] and "64 + 24" in lines[1]
    assert lines[-1] == "key: the-key-of-this" and len(_greeting(api, trained(), "http://box:8400", "")) == 3
    try:
        speak("zh")
        assert "密钥" in str(_greeting(api, trained(), "http://box:8400", "the-key-of-this")[-1])
    finally:
        speak("en")
