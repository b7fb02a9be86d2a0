"""What bodies take while they are read and parsed, many at once and the worst of them."""

from __future__ import annotations

from serving.app import BODY_BYTES, PARSED, READ_BYTES
from support.units import KIB
from tests.measuring import in_child

CONNECTIONS = 80
CONNECTION_BYTES = 64 * KIB  # both ends of one, which lie in the same process here

SERVER = """
import asyncio

from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from serving.app import BODY_BYTES, READ_BYTES
from support.web.bodies import ByteBudget, announced_bytes, object_of, read_body
from support.web.listening import listen, server_of

bodies = ByteBudget(READ_BYTES)
seated = READ_BYTES // BODY_BYTES


async def answer(request):
    with bodies.reserve(announced_bytes(request, BODY_BYTES)):
        return Response(await read_body(request, BODY_BYTES))


async def ask(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"POST / HTTP/1.1\\r\\nHost: here\\r\\nContent-Length: {BODY_BYTES}\\r\\n\\r\\n".encode())
    writer.write(b"x" * (BODY_BYTES - 1))
    await writer.drain()
    assert b" 429 " in await reader.readline()
    return writer


async def go(times):
    server = server_of(Starlette(routes=[Route("/", answer, methods=["POST"])]), 1)
    listener = listen("127.0.0.1", 0)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    asked = [asyncio.create_task(ask(listener.getsockname()[1])) for _ in range(times)]
    refused = []
    for one in asyncio.as_completed(asked):
        refused.append(await one)
        if len(refused) == times - seated:
            break
    for one in asked:
        one.cancel()
    serving.cancel()
    await asyncio.gather(serving, *asked, return_exceptions=True)


asyncio.run(go(seated + 4))
print(measure(lambda: asyncio.run(go(int(sys.argv[1])))))
for piece in (b'{"":0},', b"[],", b"{},", b'"ab",', b"1000,"):
    body = b'{"x":[' + piece * ((BODY_BYTES - 10) // len(piece)) + b"0]}"
    assert len(body) <= BODY_BYTES
    print(measure(lambda: object_of(body)))
"""


def test_bodies_take_no_more_than_is_planned() -> None:
    """Many at once: those for which there is no room are refused, and what they have sent is not held. And one that is
    parsed.
    """
    together, *parsed = in_child(SERVER, CONNECTIONS)
    assert together <= 2 * READ_BYTES + CONNECTIONS * CONNECTION_BYTES < CONNECTIONS * BODY_BYTES
    assert len(parsed) == 5 and max(parsed) <= PARSED * BODY_BYTES
