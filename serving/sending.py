"""Answers leave in pieces, and what a request holds is given back when the last of them has left.

A client that does not read would otherwise leave its whole answer in this process: a server takes what it is given to
send, and counts the request as done. Here the next piece waits for the one before; `support.web.listening` closes a
connection that takes none.
"""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from support.web.bodies import ByteBudget, Reservation

PIECE_BYTES = 2**15
RESERVATION = "held_memory"  # The key of the reservation in a request's scope.


class Sending:
    """Around the whole application.

    Args:
        memory: what all requests may hold from when they are understood until they are answered.
    """

    def __init__(self, app: ASGIApp, memory: ByteBudget) -> None:
        self._app = app
        self._memory = memory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with self._memory.reserve(0) as reservation:
            await self._app({**scope, RESERVATION: reservation}, receive, partial(_send_in_pieces, send))


def reservation_of(request: Request) -> Reservation:
    """The memory that a request holds."""
    reservation: Reservation = request.scope[RESERVATION]
    return reservation


async def _send_in_pieces(send: Send, message: Message) -> None:
    """Send one message of ASGI; the end is a message of its own, which the server sends when everything before has
    left.
    """
    if message["type"] != "http.response.body":
        await send(message)
        return
    body = message.get("body", b"")
    for start in range(0, len(body), PIECE_BYTES):
        piece = bytes(body[start : start + PIECE_BYTES])
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    if not message.get("more_body", False):
        await send({"type": "http.response.body", "body": b"", "more_body": False})
