"""Which addresses does the page have? Each is a few lines: what came in is checked, `board.service` does the work."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from board.form import form
from board.places import DATA_SUFFIXES, Outside, inside, json_bytes
from board.runs import size_of
from board.service import Board
from board.streams import overview_events, run_events
from config import UserError, load
from units import format_size
from web.bodies import read_object
from web.guard import Guard

STATIC = Path(__file__).resolve().parent / "static"
PAGES = ("/", "/run/{name}", "/new", "/plan", "/chat")
DISK_SPARE = 2**28
UNASKED_BYTES = 2**22  # of an upload, until the disk is asked again what is free
LONGEST_QUESTION = 20_000  # letters
Answer = Callable[[Request], Awaitable[Response]]


class Told(JSONResponse):
    """An answer in JSON, also where a file that was read holds what is no text."""

    def render(self, content: Any) -> bytes:
        """The answer as it is sent."""
        return json_bytes(content, allow_nan=False)


def make_app(board: Board, token: str = "", hosts: Iterable[str] = ()) -> Starlette:
    """The whole page as an application.

    Args:
        token: what opens it; empty: nothing is needed. hosts: names of this machine.
    """

    @contextlib.asynccontextmanager
    async def living(app: Starlette) -> AsyncIterator[None]:
        work = [asyncio.create_task(board.launcher.work()), asyncio.create_task(board.talks.work())]
        yield
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)

    app = Starlette(
        routes=[
            *(Route(path, _page) for path in PAGES),
            *_api(board),
            Mount("/static", StaticFiles(directory=STATIC)),
        ],
        middleware=[Middleware(Guard, token=token, hosts=tuple(hosts)), Middleware(GZipMiddleware, minimum_size=2000)],
        exception_handlers={UserError: _refused, ValueError: _refused, OSError: _refused},
        lifespan=living,
    )
    app.router.redirect_slashes = False
    return app


async def _page(request: Request) -> Response:
    return FileResponse(STATIC / "index.html", headers={"Cache-Control": "no-cache"})


async def _refused(request: Request, error: Exception) -> Response:
    if isinstance(error, OSError):
        return Told({"problems": [error.strerror or "cannot be read or written"]}, 409)
    code = 404 if isinstance(error, Outside) else 422 if isinstance(error, UserError) else 400
    return Told({"problems": getattr(error, "problems", [str(error) or "not understood"])}, code)


def _api(board: Board) -> list[Route]:
    table: dict[str, tuple[str, Callable[[Board, Request], Awaitable[Response]]]] = {
        "/api/form": ("GET", _form), "/api/runs": ("GET", _runs), "/api/stream": ("GET", _overview_stream),
        "/api/compare": ("GET", _compare), "/api/runs/{name}": ("GET", _run),
        "/api/runs/{name}/stream": ("GET", _run_stream), "/api/runs/{name}/window": ("GET", _window),
        "/api/runs/{name}/log": ("GET", _log), "/api/runs/{name}/size": ("GET", _size),
        "/api/runs/{name}/wish": ("POST", _wish),
        "/api/plan": ("POST", _plan), "/api/plans": ("GET", _plans), "/api/start": ("POST", _start),
        "/api/data": ("GET", _data), "/api/preview": ("GET", _preview), "/api/data/{name}": ("PUT", _upload),
        "/api/models": ("GET", _models), "/api/talk": ("POST", _talk), "/api/talk/reset": ("POST", _forget),
    }  # fmt: skip

    def bound(answer: Callable[[Board, Request], Awaitable[Response]]) -> Answer:
        async def endpoint(request: Request) -> Response:
            return await answer(board, request)

        return endpoint

    return [Route(path, bound(answer), methods=[method]) for path, (method, answer) in table.items()]


def _flags(body: dict[str, Any]) -> dict[str, Any]:
    flags = body.get("flags", {})
    if not isinstance(flags, dict):
        raise HTTPException(400, "flags are a table")
    return flags


def _known(board: Board, request: Request) -> str:
    name = str(request.path_params["name"])
    if not board.is_known(name):
        raise Outside(f"there is no run {name[:80]!r}")
    return name


def _events(events: AsyncIterator[bytes]) -> Response:
    return StreamingResponse(
        events, media_type="text/event-stream", headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    )


# --- runs ---


async def _form(board: Board, request: Request) -> Response:
    return Told(form())


async def _runs(board: Board, request: Request) -> Response:
    return Told(await asyncio.to_thread(board.overview))


async def _overview_stream(board: Board, request: Request) -> Response:
    return _events(overview_events(board))


async def _run(board: Board, request: Request) -> Response:
    name = _known(board, request)
    drawn = await asyncio.to_thread(board.compare, [name])
    return Told({**await asyncio.to_thread(board.details, name), "chart": drawn["runs"][name]})


async def _run_stream(board: Board, request: Request) -> Response:
    return _events(run_events(board, _known(board, request)))


async def _window(board: Board, request: Request) -> Response:
    first, last = (int(request.query_params.get(key, "x")) for key in ("first", "last"))
    if not 0 <= first <= last < 2**40:
        raise ValueError
    return Told(await asyncio.to_thread(board.window, _known(board, request), first, last))


async def _log(board: Board, request: Request) -> Response:
    return PlainTextResponse(await asyncio.to_thread(board.log, _known(board, request)))


async def _size(board: Board, request: Request) -> Response:
    return Told({"bytes": await asyncio.to_thread(size_of, board.places, _known(board, request))})


async def _compare(board: Board, request: Request) -> Response:
    return Told(await asyncio.to_thread(board.compare, request.query_params.getlist("name")))


async def _wish(board: Board, request: Request) -> Response:
    name, asked = _known(board, request), await read_object(request)
    word, problem = asked.get("word"), ""
    if word == "resume":
        more = asked.get("max_steps")
        await asyncio.to_thread(board.resume, name, more if type(more) is int and more > 0 else None)
    elif word == "withdraw":
        await asyncio.to_thread(board.launcher.withdraw, name)
    elif word == "delete":
        problem = await asyncio.to_thread(board.launcher.delete, name)
    else:
        await asyncio.to_thread(board.launcher.wish, name, str(word))
    return Told({"problems": [problem]} if problem else {"done": word}, 409 if problem else 200)


# --- new runs ---


async def _plan(board: Board, request: Request) -> Response:
    return Told(await board.plan(_flags(await read_object(request))))


async def _plans(board: Board, request: Request) -> Response:
    """The plans of a model on all machines that have a name, and on this one."""
    flags = {name: request.query_params.get(name, "") for name in ("model_preset", "memory_mode")}
    if flags["model_preset"] not in form()["models"] or flags["memory_mode"] not in ("", "standard", "low", "ultra"):
        raise Outside("no such model or mode")
    given = {name: value for name, value in flags.items() if value}
    return Told(await board.planner.plans_of(given, ["auto", *form()["machines"]]))


async def _start(board: Board, request: Request) -> Response:
    flags = _flags(await read_object(request))
    return Told({"name": await asyncio.to_thread(board.start, flags)})


# --- data and models ---


async def _data(board: Board, request: Request) -> Response:
    files = await asyncio.to_thread(board.places.data_files)
    return Told({"files": files, "folder": str(board.places.data_dir), "limit": board.upload_limit})


async def _preview(board: Board, request: Request) -> Response:
    return Told(await board.preview(request.query_params.get("file", "")))


async def _upload(board: Board, request: Request) -> Response:
    name = str(request.path_params["name"])
    place = inside(board.places.data_dir, name)
    if "/" in name or name.startswith(".") or place.suffix.lower() not in DATA_SUFFIXES:
        raise UserError(f"{name[:80]}, is no data file; allowed: {', '.join(DATA_SUFFIXES)}")
    if place.exists():
        raise UserError(f"{name}, is there already; rename the new one")
    _refuse_large(board, name, _announced_bytes(request))
    await _refuse_full(board, name, _announced_bytes(request))
    partial = place.with_name(f".upload-{secrets.token_hex(8)}")
    taken = unasked = 0
    try:
        with partial.open("xb") as file:
            async for chunk in request.stream():
                taken, unasked = taken + len(chunk), unasked - len(chunk)
                _refuse_large(board, name, taken)
                if unasked < 0:  # others may write as well, so what was free at the beginning need not be now
                    await _refuse_full(board, name, len(chunk))
                    unasked = UNASKED_BYTES
                await asyncio.to_thread(file.write, chunk)
        os.link(partial, place)  # unlike a rename, this never replaces a file that has come meanwhile
    except ClientDisconnect:
        return PlainTextResponse("left", 400)
    finally:
        partial.unlink(missing_ok=True)
    return Told({"name": name, "bytes": taken})


def _announced_bytes(request: Request) -> int:
    """How long a request says that its body is; 0 where it does not."""
    told = request.headers.get("content-length", "")
    return int(told) if told.isdecimal() and len(told) < 20 else 0


def _refuse_large(board: Board, name: str, size: int) -> None:
    if size > board.upload_limit:
        raise UserError(f"{name}, is larger than {board.upload_limit:,} bytes, which is what may be uploaded")


async def _refuse_full(board: Board, name: str, size: int) -> None:
    """Refuse what the disk cannot take without what is kept free of it."""
    free = await asyncio.to_thread(board.free_disk_bytes)
    if size > free - DISK_SPARE:
        raise UserError(
            f"{name}, does not fit on the disk: it has only {format_size(free)} left, and {format_size(DISK_SPARE)} are "
            "kept free; free space, or take a smaller file"
        )


async def _models(board: Board, request: Request) -> Response:
    return Told({"models": await asyncio.to_thread(board.models)})


async def _talk(board: Board, request: Request) -> Response:
    asked = await read_object(request)
    pane, model, text = (str(asked.get(key, "")) for key in ("pane", "model", "text"))
    given = asked.get("options") or {}
    options = {name: str(value) for name, value in given.items()} if isinstance(given, dict) else {}
    load("chat", options)
    board.places.model(model)
    if not text.strip():
        raise UserError("text, is empty; ask something")
    if len(text) > LONGEST_QUESTION:
        raise UserError(f"text, has {len(text):,} characters; allowed: {LONGEST_QUESTION:,}; ask with less")
    goes_on = asked.get("goes_on") is True

    async def lines() -> AsyncIterator[bytes]:
        async for told in board.talks.answer(pane[:40], model, text, options, goes_on):
            yield json_bytes(told) + b"\n"

    headers = {"Cache-Control": "no-store", "Content-Encoding": "identity"}  # packed, pieces would wait for more
    return StreamingResponse(lines(), media_type="application/x-ndjson", headers=headers)


async def _forget(board: Board, request: Request) -> Response:
    await board.talks.forget(str((await read_object(request)).get("pane", "")))
    return Told({"done": True})
