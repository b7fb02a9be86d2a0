"""What the API is opened with: its address, its key, what it tells, and what is refused before a model is loaded."""

from __future__ import annotations

import socket

import pytest

from model import hf_format
from serving.server import serve
from settings.errors import UserError
from tests.serving.served import settings, trained


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    trained()
    monkeypatch.setattr(hf_format, "load", lambda *_, **__: pytest.fail("the model is loaded"))


def test_a_port_that_is_taken_is_told_before_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(UserError, match=f"--port = {port}, cannot be listened at"):
            serve(settings(port=port))


@pytest.mark.parametrize("host", ["::", "192.168.0.7"])
def test_others_are_never_let_in_without_a_key(host: str) -> None:
    with pytest.raises(UserError, match=r"--token = none, would let anybody .* use this model"):
        serve(settings(host=host, token="none"))
    with pytest.raises(UserError, match="shorter than 12"):
        serve(settings(host=host, token="short"))
