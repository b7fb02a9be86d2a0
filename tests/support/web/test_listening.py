"""What a connection holds."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from support.web import listening
from support.web.listening import Connection, server_of


class Wire(asyncio.Transport):
    """Takes what is written; what its client reads of it is said by `unsent`, sizes at one look after the other."""

    def __init__(self, *unsent: int) -> None:
        super().__init__()
        self.written = b""
        self.unsent = list(unsent)
        self.is_cut = asyncio.Event()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return self.unsent.pop(0)

    def abort(self) -> None:
        self.is_cut.set()

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


def connection_over(wire: Wire, app: ASGIApp) -> Connection:
    config = server_of(app, 1).config
    config.load()
    connection = cast(Any, config.http_protocol_class)(config=config, server_state=ServerState(), app_state={})
    assert isinstance(connection, Connection)
    connection.connection_made(wire)
    return connection


def test_a_client_that_reads_nothing_is_cut_off_and_a_slow_one_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(listening, "UNREAD_SECONDS", 0.001)

    async def go() -> None:
        wire = Wire(300, 200, 100, 100)
        connection = connection_over(wire, PlainTextResponse("no"))
        connection.pause_writing()
        await asyncio.wait_for(wire.is_cut.wait(), 60)
        assert not wire.unsent, "it was waited for as long as it read"
        connection.connection_lost(None)

    asyncio.run(go())
    assert "a client has read nothing of its answer" in capsys.readouterr().out
