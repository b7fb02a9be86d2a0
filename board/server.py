"""How is the page served? One process, one thread of requests, until Ctrl-C; runs that it started go on."""

from __future__ import annotations

import ipaddress
import platform
import secrets
import socket
from pathlib import Path

import uvicorn

from board.app import make_app
from board.places import Places
from board.service import Board
from config import Config, UserError
from settings.fields import AUTO

LEAVE_SECONDS = 1  # given to open streams at the end


def serve(config: Config, places: Places) -> None:
    """Serve until interrupted.

    Raises:
        UserError: the address cannot be listened at, or would let others in without a token.
    """
    settings = config.board
    token = token_of(settings.token, settings.host)
    listener = _listen(settings.host, settings.port)
    port = listener.getsockname()[1]
    app = make_app(Board(places, Path.cwd(), settings.upload_limit), token, (settings.host, platform.node()))
    where = f"http://{_shown(settings.host)}:{port}/" + (f"?token={token}" if token else "")
    print(f"the page is at {where}  (Ctrl-C ends it; runs go on)", flush=True)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=LEAVE_SECONDS,
            lifespan="on",
            server_header=False,
            http="h11",
            ws="none",
            loop="asyncio",
        )
    )
    server.run(sockets=[listener])


def token_of(asked: str | None, host: str) -> str:
    """The word that opens the page; empty where none is needed.

    Raises:
        UserError: others could reach a page without one.
    """
    is_local = host == "localhost" or _is_loopback(host)
    if asked == AUTO:
        return "" if is_local else secrets.token_urlsafe(18)
    if not asked and not is_local:
        raise UserError(
            f"--token = none, would let anybody who reaches {host} start programs here; leave it out, and one is drawn"
        )
    if asked and len(asked) < 12:
        raise UserError("--token = ..., is shorter than 12 letters; leave it out, and one is drawn")
    return asked or ""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _shown(host: str) -> str:
    if host in ("0.0.0.0", "::"):
        host = platform.node()
    return f"[{host}]" if ":" in host else host


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, number)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        raise UserError(
            f"--port = {port}, cannot be listened at on {host}: {error.strerror}; name another, such as --port={port + 1}"
        ) from None
    return listener
