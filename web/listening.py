"""Where a server listens, what opens it, and how it runs: one process, one thread of requests, until it is ended."""

from __future__ import annotations

import ipaddress
import platform
import secrets
import socket
from contextlib import ExitStack

from starlette.types import ASGIApp
from uvicorn import Config, Server
from uvicorn.protocols.http.h11_impl import H11Protocol

from settings.errors import UserError, reason_of
from settings.fields import AUTO

__all__ = ["Server", "address_of", "listen", "own_names", "server_of", "token_of"]

LEAST_TOKEN = 12  # letters


def token_of(asked: str | None, host: str, what: str = "start programs here") -> str:
    """The word that opens the server; empty where none is needed.

    Args:
        asked: `--token`. what: what others could do without one.
    Raises:
        UserError: others could reach the server without one.
    """
    is_local = host == "localhost" or _is_loopback(host)
    if asked == AUTO:
        return "" if is_local else secrets.token_urlsafe(18)
    if not asked and not is_local:
        raise UserError(
            "--token = none, would let anybody who reaches {host} {what}; omit it, and a random one is generated",
            host=host,
            what=what,
        )
    if asked and len(asked) < LEAST_TOKEN:
        raise UserError(
            "--token = ..., is shorter than {least_token} letters; omit it, and a random one is generated",
            least_token=LEAST_TOKEN,
        )
    return asked or ""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def address_of(host: str, listener: socket.socket) -> str:
    """What a browser or a program is told: http://HOST:PORT."""
    if host in ("0.0.0.0", "::"):
        host = platform.node()
    return f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"


def own_names(host: str) -> tuple[str, ...]:
    """Names of this machine, for `Guard`."""
    return host, platform.node()


def listen(host: str, port: int) -> socket.socket:
    """Open the port; 0 takes any that is free.

    Raises:
        UserError: it cannot be listened at.
    """
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with ExitStack() as opened:
            listener = opened.enter_context(socket.socket(family, kind, number))
            # on Windows the first would let two listen at one port
            own = getattr(socket, "SO_EXCLUSIVEADDRUSE", socket.SO_REUSEADDR)
            listener.setsockopt(socket.SOL_SOCKET, own, 1)
            listener.bind(address)
            listener.listen(128)
            opened.pop_all()
    except OSError as error:
        raise UserError(
            "--port = {port}, cannot be listened at on {host}: {reason}; choose another, such as --port={other_port}",
            port=port,
            host=host,
            reason=reason_of(error),
            other_port=port + 1,
        ) from None
    return listener


class Connection(H11Protocol):
    """One connection. What came of a body that nobody has read goes with the answer, however long the connection stays."""

    def on_response_complete(self) -> None:
        """Called by uvicorn behind each answer."""
        self.cycle.body = bytearray()
        super().on_response_complete()


def server_of(app: ASGIApp, leave_seconds: int) -> Server:
    """A server for an application; `run(sockets=[listener])` serves until SIGINT or SIGTERM.

    Args:
        leave_seconds: given to open answers at the end.
    """
    return Server(
        Config(
            app,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=leave_seconds,
            lifespan="on",
            server_header=False,
            proxy_headers=False,  # who has taken a cookie could name its owner's address
            http=Connection,
            ws="none",
            loop="asyncio",
        )
    )
