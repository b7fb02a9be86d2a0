"""Where a server listens, what opens it, and how it runs: one process, one thread of requests, until it is ended."""

from __future__ import annotations

import asyncio
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
from support.language import say

__all__ = ["Server", "address_of", "listen", "own_names", "server_of", "token_of"]

LEAST_TOKEN = 12  # letters
UNREAD_SECONDS = 20  # A client that takes nothing of its answer for so long is cut off.
RECEIVED_BYTES = 2**15  # At most so many are read from a connection at once.
MOST_CONNECTIONS = 512


def token_of(setting: str | None, host: str, what: str = "start programs here") -> str:
    """The word that opens the server; empty where none is needed.

    Args:
        setting: `--token`. what: what others could do without one.
    Raises:
        UserError: others could reach the server without one.
    """
    is_local = host == "localhost" or _is_loopback(host)
    if setting == AUTO:
        return "" if is_local else secrets.token_urlsafe(18)
    token = setting or ""
    if not token and not is_local:
        raise UserError(
            "--token = none, would let anybody who reaches {host} {what}; omit it, and a random one is generated",
            host=host,
            what=what,
        )
    if 0 < len(token) < LEAST_TOKEN:
        raise UserError(
            "--token = ..., is shorter than {least_token} letters; omit it, and a random one is generated",
            least_token=LEAST_TOKEN,
        )
    return token


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
            # With SO_REUSEADDR, two servers could listen at one port on Windows.
            option = getattr(socket, "SO_EXCLUSIVEADDRUSE", socket.SO_REUSEADDR)
            listener.setsockopt(socket.SOL_SOCKET, option, 1)
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
    """One connection, which holds little of what its client sends and does not read.

    What came of a body that nobody has read goes with the answer, however long the connection stays. An application
    that sends on waits until everything before is with the system, and a client that takes none of it is cut off.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called by asyncio."""
        self._unsent_bytes = 0
        self._reading_timer: asyncio.TimerHandle | None = None
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)
        transport.max_size = RECEIVED_BYTES  # type: ignore[attr-defined]
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()

    def pause_writing(self) -> None:
        """Called by asyncio where something is left to send."""
        super().pause_writing()
        self._unsent_bytes = self.transport.get_write_buffer_size()
        self._reading_timer = self.loop.call_later(UNREAD_SECONDS, self._check_reading)

    def resume_writing(self) -> None:
        """Called by asyncio when all has been sent."""
        super().resume_writing()
        self._stop_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio."""
        self._stop_timer()
        super().connection_lost(exc)

    def _check_reading(self) -> None:
        unsent = self.transport.get_write_buffer_size()
        if unsent < self._unsent_bytes:
            self._unsent_bytes = unsent
            self._reading_timer = self.loop.call_later(UNREAD_SECONDS, self._check_reading)
            return
        message = say(
            "a client has read nothing of its answer for {seconds} seconds; its connection is closed",
            seconds=UNREAD_SECONDS,
        )
        print(message, flush=True)
        self.transport.abort()

    def _stop_timer(self) -> None:
        if self._reading_timer is not None:
            self._reading_timer.cancel()
            self._reading_timer = None

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
            # Uvicorn's own closes the handlers of other libraries, and absl's closes standard error with it.
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=leave_seconds,
            lifespan="on",
            server_header=False,
            proxy_headers=False,  # A thief of a cookie could name its owner's address in them.
            http=Connection,
            ws="none",
            loop="asyncio",
        )
    )
