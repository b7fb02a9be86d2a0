"""What a connection holds."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from starlette.responses import PlainTextResponse
from uvicorn.server import ServerState

from web.bodies import BODY_BYTES
from web.listening import Connection, server_of


class Wire(asyncio.Transport):
    """Takes what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""

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


def test_a_body_that_is_refused_unread_is_not_held() -> None:
    """Its connection may stay: what each had sent stood in memory, however many were refused."""

    async def go() -> None:
        config = server_of(PlainTextResponse("no", 429), 1).config
        config.load()
        wire = Wire()
        connection = cast(Any, config.http_protocol_class)(config=config, server_state=ServerState(), app_state={})
        assert isinstance(connection, Connection)
        connection.connection_made(wire)
        head = f"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: {BODY_BYTES}\r\n\r\n".encode()
        connection.data_received(head + b"x" * (BODY_BYTES // 2))
        await asyncio.gather(*connection.tasks)
        assert b"429" in wire.written.splitlines()[0] and not connection.cycle.body
        connection.data_received(b"x" * (BODY_BYTES // 4))
        assert not connection.cycle.body
        connection.connection_lost(None)

    asyncio.run(go())
