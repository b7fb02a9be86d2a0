"""The addresses of the page: what comes in is checked, `board.service` does the work."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
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
from board.reader import DATA_SUFFIXES, MOST_STEPS, Outside, inside
from board.runs import size_of
from board.service import Board
from board.streams import json_bytes, overview_events, run_events
from settings.errors import UserError, reason_of
from support.language import join, say, speak_here, spoken
from support.units import format_size
from support.web.bodies import content_length, read_object
from support.web.guard import Guard

STATIC = Path(__file__).resolve().parent / "static"
PAGES = ("/", "/run/{name}", "/new", "/plan", "/chat")
DISK_SPARE = 2**28
LONGEST_QUESTION = 20_000  # letters
REFUSALS: dict[type[Exception], int] = {OSError: 409, Outside: 404, UserError: 422, ValueError: 400}


class Json(JSONResponse):
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

    async def page(request: Request, code: int = 200) -> Response:
        return FileResponse(STATIC / "index.html", code, headers={"Cache-Control": "no-cache"})

    async def missing(request: Request, error: Exception) -> Response:
        """What a browser opens gets a page that says so; a program gets JSON."""
        is_opened = request.method == "GET" and "text/html" in request.headers.get("accept", "")
        if is_opened and not request.url.path.startswith(("/api/", "/static/")):
            return await page(request, 404)
        return Json({"problems": [say("there is nothing at this address")]}, 404)

    app = Starlette(
        routes=[*(Route(path, page) for path in PAGES), *_api(board), Mount("/static", StaticFiles(directory=STATIC))],
        middleware=[Middleware(Guard, token=token, hosts=tuple(hosts)), Middleware(GZipMiddleware, minimum_size=2000)],
        exception_handlers={404: missing, **{kind: _refusal(code) for kind, code in REFUSALS.items()}},
        lifespan=living,
    )
    app.router.redirect_slashes = False
    return app


def _refusal(code: int) -> Callable[[Request, Exception], Awaitable[Response]]:
    """What answers a request that has raised an error."""

    async def refuse(request: Request, error: Exception) -> Response:
        return Json({"problems": getattr(error, "problems", [reason_of(error) or say("not understood")])}, code)

    return refuse


def _api(board: Board) -> list[Route]:
    """Routes of what the table names; answers are made in a thread of their own, then awaited where they are to be."""

    def route(method: str, path: str, answer: Callable[..., Any]) -> Route:
        async def endpoint(request: Request) -> Response:
            speak_here("zh" if request.headers.get("accept-language", "").startswith("zh") else "en")
            body = [await read_object(request)] if method == "POST" else []
            content = await asyncio.to_thread(answer, board, request, *body)
            if inspect.isawaitable(content):
                content = await content
            return content if isinstance(content, Response) else Json(content)

        return Route(path, endpoint, methods=[method])

    table: list[tuple[str, str, Callable[..., Any]]] = [
        ("GET", "/api/form", lambda board, request: form(spoken())),
        ("GET", "/api/runs", lambda board, request: board.overview()),
        ("GET", "/api/stream", lambda board, request: _events(overview_events(board))),
        ("GET", "/api/compare", lambda board, request: board.compare(request.query_params.getlist("name"))),
        ("GET", "/api/runs/{name}", _run),
        ("GET", "/api/runs/{name}/stream", lambda board, request: _events(run_events(board, _known(board, request)))),
        ("GET", "/api/runs/{name}/window", _window),
        ("GET", "/api/runs/{name}/log", lambda board, request: PlainTextResponse(board.log(_known(board, request)))),
        ("GET", "/api/runs/{name}/size", _size),
        ("POST", "/api/runs/{name}/wish", _wish),
        ("POST", "/api/plan", lambda board, request, body: board.plan(_flags(body))),
        ("GET", "/api/plans", _plans),
        ("POST", "/api/start", lambda board, request, body: {"name": board.start(_flags(body))}),
        ("GET", "/api/data", _data),
        ("GET", "/api/preview", lambda board, request: board.preview(request.query_params.get("file", ""))),
        ("PUT", "/api/data/{name}", _upload),
        ("GET", "/api/models", lambda board, request: {"models": board.models()}),
        ("POST", "/api/talk", _talk),
    ]
    return [route(*row) for row in table]


def _flags(body: dict[str, Any]) -> dict[str, Any]:
    flags = body.get("flags", {})
    if not isinstance(flags, dict):
        raise HTTPException(400, "flags are a table")
    return flags


def _known(board: Board, request: Request) -> str:
    name = str(request.path_params["name"])
    if not board.is_known(name):
        raise Outside(say("there is no run {name!r}", name=name[:80]))
    return name


def _events(events: AsyncIterator[bytes]) -> Response:
    return StreamingResponse(
        events, media_type="text/event-stream", headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    )


def _run(board: Board, request: Request) -> Any:
    name = _known(board, request)
    chart = board.compare([name])["runs"][name]
    return {**board.details(name, board.history(name)), "chart": chart}


def _size(board: Board, request: Request) -> Any:
    return {"bytes": size_of(board.folders, _known(board, request))}


def _window(board: Board, request: Request) -> Any:
    first, last = (int(request.query_params.get(key, "x")) for key in ("first", "last"))
    if not 0 <= first <= last < MOST_STEPS:
        raise ValueError
    return board.window(_known(board, request), first, last)


def _wish(board: Board, request: Request, body: dict[str, Any]) -> Any:
    name = _known(board, request)
    word = body.get("word")
    match word:
        case "resume":
            board.resume(name, **{key: str(value) for key, value in body.items() if key == "max_steps"})
        case "withdraw":
            board.launcher.withdraw(name)
        case "delete":
            problem = board.launcher.delete(name)
            if problem:
                return Json({"problems": [problem]}, 409)
        case _:
            board.launcher.request(name, str(word))
    return {"done": word}


def _plans(board: Board, request: Request) -> Any:
    """The plans of a model on all machines that have a name, and on this one."""
    model = request.query_params.get("model_preset", "")
    mode = request.query_params.get("memory_mode") or "auto"
    if model not in form(spoken())["models"] or mode not in ("auto", "standard", "low", "ultra"):
        raise Outside("no such model or mode")
    flags = {"model_preset": model, "memory_mode": mode}
    return board.planner.plans_of(flags, ["auto", *form(spoken())["machines"]])


def _data(board: Board, request: Request) -> Any:
    return {"files": board.folders.data_files(), "folder": str(board.folders.data_dir)}


async def _upload(board: Board, request: Request) -> Response:
    name = str(request.path_params["name"])
    path = inside(board.folders.data_dir, name)
    if name.startswith(".") or path.suffix.lower() not in DATA_SUFFIXES:
        raise UserError(
            say("{file} is not a data file; allowed: {allowed}", file=name[:80], allowed=join(", ", DATA_SUFFIXES))
        )
    if path.exists():
        raise UserError(say("{file} already exists; rename the new file", file=name))
    partial = path.with_name(f".upload-{secrets.token_hex(8)}")
    _refuse_large(board, name, content_length(request, otherwise=0))
    size = 0
    try:
        with partial.open("xb") as file:
            async for chunk in request.stream():
                size += len(chunk)
                _refuse_large(board, name, len(chunk))  # Others may write as well.
                await asyncio.to_thread(file.write, chunk)
        os.link(partial, path)  # Unlike a rename, this never replaces a file that has come meanwhile.
    except ClientDisconnect:
        return PlainTextResponse("left", 400)
    finally:
        partial.unlink(missing_ok=True)
    return Json({"name": name, "bytes": size})


def _refuse_large(board: Board, name: str, more: int) -> None:
    """Refuse a file of which the disk cannot take so many bytes more."""
    free = board.free_disk_bytes()
    if more > free - DISK_SPARE:
        raise UserError(
            say(
                "{file} does not fit on the disk: {free} are free, of which {spare} are reserved; free some space or "
                "use a smaller file",
                file=name,
                free=format_size(free),
                spare=format_size(DISK_SPARE),
            )
        )


def _talk(board: Board, request: Request, body: dict[str, Any]) -> Response:
    model = str(body.get("model", ""))
    question = str(body.get("text", ""))
    history = body.get("history", [])
    board.folders.model(model)
    if not question.strip():
        raise UserError(say("the message is empty"))
    if len(question) > LONGEST_QUESTION:
        raise UserError(
            say(
                "the message has {length} characters; allowed: {most}",
                length=f"{len(question):,}",
                most=f"{LONGEST_QUESTION:,}",
            )
        )
    if not isinstance(history, list):
        raise HTTPException(400, "history is a list of messages")
    messages = [*history, {"role": "user", "content": question}]

    async def lines() -> AsyncIterator[bytes]:
        async with contextlib.aclosing(board.talks.answer(model, messages, body.get("temperature", 0))) as records:
            async for record in records:
                yield json_bytes(record) + b"\n"

    headers = {"Cache-Control": "no-store", "Content-Encoding": "identity"}  # packed, pieces would wait for more
    return StreamingResponse(lines(), media_type="application/x-ndjson", headers=headers)
