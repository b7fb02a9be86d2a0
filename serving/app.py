"""The addresses of the API: `asking` reads a request, `engine` writes its answers, `replies` gives the form."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from commands.text_rows import in_parts
from commands.vector_files import Vectors
from serving.answers import Answer, Refused, Update
from serving.asking import (
    OPEN_BYTES,
    AnswerRequest,
    LabelRequest,
    Texts,
    VectorRequest,
    read_chat,
    read_completion,
    read_embeddings,
    read_labels,
    read_question,
)
from serving.engine import AnswerEngine
from serving.replies import END, ChatForm, Finished, Form, event, problem, refusal
from serving.reranking import PATH as RERANK_PATH
from serving.reranking import RerankRequest, answer_of, read_rerank
from serving.sending import Sending, reservation_of
from settings.declared import GenerateConfig
from settings.errors import UserError
from support.language import join, say
from support.web.bodies import ByteBudget, announced_bytes, object_of, read_body
from support.web.guard import Guard

BODY_BYTES = 2**18
READ_BYTES = 16 * BODY_BYTES  # All bodies that are being read may hold so much.
PARSED = 40  # times its body that a JSON object takes at the most; one is parsed at a time
READING_BYTES = 2 * READ_BYTES + PARSED * BODY_BYTES  # a body stands twice where its parts are put together
PART_TOKENS = 4096  # Vectors of so many tokens are computed between two steps.
VECTORS_AT_ONCE = 16  # are sent before other requests have their turn
CLIENT_LEFT = 499  # the client closed the request; nobody reads it
STREAM_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
OPEN_PATHS = ("/health",)
MOST_REPORTED = 50  # fields that are ignored; more are not listed
AnyRequest = TypeVar("AnyRequest", AnswerRequest, VectorRequest, LabelRequest, RerankRequest)
Row = TypeVar("Row")
Result = TypeVar("Result")
Read = Callable[[dict[str, Any], Texts, GenerateConfig], AnyRequest]


@dataclass
class Flow:
    """The answers of one request, and what is new of them; for a client that reads slowly no more is kept than their
    text.
    """

    answers: list[Answer] = field(default_factory=list)
    _new: dict[int, Update] = field(default_factory=dict)
    _has_new: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, index: int, update: Update) -> None:
        """Add to what is new of an answer."""
        before = self._new.get(index, Update())
        self._new[index] = replace(update, text=before.text + update.text)
        self._has_new.set()

    async def get(self) -> tuple[int, Update]:
        """Wait for something new: number of the answer, and all that is new of it."""
        await self._has_new.wait()
        index = next(iter(self._new))
        update = self._new.pop(index)
        if not self._new:
            self._has_new.clear()
        return index, update


@dataclass
class Api:
    """What the addresses share.

    Args:
        name: of the model. created: when it was, seconds since 1970. other_names: by which requests may name it too.
        defaults: how tokens are chosen where a request says nothing; their number is the most.
        seconds: longest time of a request. seed: of requests that name none; None: each has another.
        memory: what requests may hold from when they are understood until their answers have left.
    """

    engine: AnswerEngine
    texts: Texts
    name: str
    created: int
    memory: ByteBudget
    defaults: GenerateConfig = field(default_factory=GenerateConfig)
    seconds: float = 600.0
    seed: int | None = None
    other_names: frozenset[str] = frozenset()
    unknown: set[str] = field(default_factory=set)  # fields of requests that were ignored and reported
    bodies: ByteBudget = field(default_factory=lambda: ByteBudget(READ_BYTES))
    parsing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _unsent: list[tuple[Flow, int, Update]] = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def running(self, app: Starlette) -> AsyncIterator[None]:
        """The engine runs until the context ends; what answers send behind a step comes to requests together."""
        loop = asyncio.get_running_loop()

        def deliver(updates: list[tuple[Flow, int, Update]]) -> None:
            for flow, index, update in updates:
                flow.put(index, update)

        def hand_over() -> None:  # in the engine's thread
            updates = self._unsent
            self._unsent = []
            if updates:
                with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody waits
                    loop.call_soon_threadsafe(deliver, updates)

        self.engine.hand_over = hand_over
        self.engine.start()
        yield
        await asyncio.to_thread(self.engine.stop)

    async def parse(self, request: Request, read: Read[AnyRequest]) -> AnyRequest:
        """What a request asks for; behind that nothing of its body is held.

        Args:
            read: reads a body of this address.
        Raises:
            Refused, HTTPException: it is wrong, or too many bodies are being read (429).
        Memory: `READING_BYTES`, for all requests together.
        """
        with self.bodies.reserve(announced_bytes(request, BODY_BYTES)):
            content = await read_body(request, BODY_BYTES)
            async with self.parsing:
                return await asyncio.to_thread(self._read, content, read)

    def _read(self, content: bytes, read: Read[AnyRequest]) -> AnyRequest:
        body = object_of(content)
        self.check_name(body.get("model"))
        parsed = read(body, self.texts, self.defaults)
        new = {name[:100] for name in parsed.unknown} - self.unknown
        if new and len(self.unknown) < MOST_REPORTED:
            self.unknown |= new
            text = "ignoring request fields that have no meaning here: {names}"
            print(say(text, names=join(", ", sorted(new))), flush=True)
        return parsed

    def check_name(self, name: object) -> None:
        """Refuse a request for another model; one that names none is for this one.

        Raises:
            Refused: no such model (404).
        """
        if name and name not in [self.name, *self.other_names]:
            text = f"The model {str(name)[:100]!r} does not exist here; there is {self.name!r}"
            raise Refused(404, text, "model", "model_not_found")

    async def computed(
        self,
        rows: Sequence[Row],
        num_tokens: Callable[[Row], int],
        work: Callable[[list[Row]], list[Result]],
        param: str = "input",
    ) -> list[Result]:
        """What the engine's thread makes of the texts of a request, in parts of about as many tokens as one prompt may
        have.

        Args:
            param: the field that has the texts.
        Raises:
            Refused: there is no room for it, it takes too long, or too many wait.
        """
        results = list[Result]()
        loop = asyncio.get_running_loop()
        end = loop.time() + self.seconds
        for part in in_parts(rows, len(rows), min(self.texts.longest, PART_TOKENS), num_tokens):
            future = asyncio.wrap_future(self.engine.compute(partial(work, part)))
            try:
                results += await asyncio.wait_for(future, max(0.0, end - loop.time()))
            except asyncio.TimeoutError:
                raise Refused(504, f"not answered within {self.seconds:g} seconds") from None
            except UserError as error:
                raise Refused(400, "; ".join(error.problems), param) from None
        return results

    def begin(self, request: Request, parsed: AnswerRequest) -> Flow:
        """Give a request to the engine.

        Raises:
            Refused, HTTPException: too many wait or hold memory, or the API is being ended.
        """
        count = len(parsed.prompts) * parsed.count
        most = self.engine.queue_limit + self.engine.capacity.rows
        if count > most:
            param = "n" if parsed.count > 1 else "prompt"
            raise Refused(400, f"{param}, asks for {count} answers at once; allowed here: {most} in one request", param)
        if self.engine.tree is not None:  # An answer of a list is never cut.
            how = replace(parsed.how, max_new_tokens=self.engine.tree.longest)
            parsed = replace(parsed, how=how, stops=())
        reservation_of(request).take(parsed.held_bytes)
        default_seed = secrets.randbits(63) if self.seed is None else self.seed
        seed = default_seed if parsed.seed is None else parsed.seed
        flow = Flow()
        for index, (ids, number) in enumerate(product(parsed.prompts, range(parsed.count))):
            answer = Answer(
                ids,
                parsed.how,
                seed + number,
                decode=self.texts.decode,
                stops=parsed.stops,
                is_streamed=parsed.is_streamed,
                send=lambda update, index=index: self._unsent.append((flow, index, update)),  # type: ignore[misc]
            )
            flow.answers.append(answer)
        self.engine.submit(flow.answers)
        return flow

    def retry_headers(self, status: int) -> dict[str, str] | None:
        """To whom there is no room for now, when a request is worth another try: what the queue takes at the speed so
        far.
        """
        if status != 429:
            return None
        meters = self.engine.meters
        step_seconds = meters.step_seconds / max(1, meters.steps)
        steps = self.engine.waiting / max(1, self.engine.running) * self.defaults.max_new_tokens / 2
        return {"Retry-After": str(1 + int(steps * step_seconds))}

    @property
    def endpoints(self) -> list[str]:
        """The addresses at which this model answers, what it was trained for first."""
        scores = [] if self.texts.scorer is None else [RERANK_PATH]
        if self.engine.decoder is not None:
            return ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", *scores]
        if self.texts.labeller is not None:
            return ["/v1/classify", "/v1/embeddings", *scores]
        return ["/v1/embeddings"]

    def check_endpoint(self, path: str) -> None:
        """Refuse a request for what this model does not do.

        Raises:
            Refused: at which addresses it answers.
        """
        if path not in self.endpoints:
            addresses = " or ".join(self.endpoints)
            raise Refused(404, f"this model does not answer at {path}; send texts to {addresses}")

    def about(self) -> dict[str, Any]:
        """The model, as clients list it."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "frugalt5",
            "endpoints": self.endpoints,
        }

    def gauges(self) -> list[tuple[str, str, int]]:
        """What there is now."""
        engine = self.engine
        monitor = engine.monitor
        sample = monitor.sample()
        return [
            ("queue_length", "answers that wait", engine.waiting),
            ("queue_limit", "answers that may wait", engine.queue_limit),
            ("running_rows", "answers being written", engine.running),
            ("running_rows_limit", "answers that may be written at once", engine.capacity.rows),
            ("running_tokens", "tokens that those being written may need", engine.tokens),
            ("running_tokens_limit", "tokens that fit into the budget", engine.capacity.tokens),
            ("memory_bytes", "anonymous memory of the process", sample.anon_bytes),
            ("memory_peak_bytes", "the most that it was", monitor.peak_bytes),
            ("memory_budget_bytes", "memory budget", monitor.budget_bytes),
            ("device_bytes", "memory held on a device of its own", sample.device_bytes),
        ]


def make_app(api: Api, token: str = "", hosts: Iterable[str] = ()) -> Starlette:
    """The API as an application; its engine runs as long as the application does.

    Args:
        token: the key; empty: none is needed. hosts: names of this machine.
    """
    sending = Middleware(Sending, memory=api.memory)
    guard = Middleware(Guard, token=token, hosts=tuple(hosts), is_page=False, open_paths=OPEN_PATHS, refuse=refusal)

    errors: dict[Any, Callable[[Request, Any], Response]] = {
        HTTPException: lambda request, error: refusal(error.status_code, error.detail, headers=error.headers),
        Exception: lambda request, error: refusal(500, "an error of this server; its terminal shows more"),
    }
    return Starlette(routes=_routes(api), middleware=[sending, guard], lifespan=api.running, exception_handlers=errors)


def _routes(api: Api) -> list[Route]:
    def route(method: str, path: str, answer: Callable[[Request], Awaitable[Response]]) -> Route:
        async def endpoint(request: Request) -> Response:
            try:
                response = await answer(request)
            except Refused as refused:
                headers = api.retry_headers(refused.status)
                response = refusal(refused.status, refused.text, refused.param, refused.code, headers)
            except HTTPException as error:
                response = refusal(error.status_code, error.detail, headers=api.retry_headers(error.status_code))
            except ClientDisconnect:
                response = Response(status_code=CLIENT_LEFT)
            except asyncio.CancelledError:
                # The server ends, and the time that open requests have is over.
                response = refusal(503, "the server is being ended")
            api.engine.meters.requests[path, response.status_code] += 1
            return response

        return Route(path, endpoint, methods=[method])

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [api.about()]})

    async def model(request: Request) -> Response:
        api.check_name(request.path_params["name"])
        return JSONResponse(api.about())

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"}) if api.engine.is_alive else JSONResponse({"status": "ending"}, 503)

    async def metrics(request: Request) -> Response:
        return PlainTextResponse(api.engine.meters.page(api.gauges()), media_type="text/plain; version=0.0.4")

    async def question(request: Request) -> Response:
        """The older projects' address: {"input_txt": ...} -> {"response": ...}."""
        api.check_endpoint("/v1/chat/completions")
        parsed = await api.parse(request, read_question)
        (finished,) = await _whole(api, request, api.begin(request, parsed))
        return JSONResponse({"response": finished.text})

    async def embeddings(request: Request) -> Response:
        parsed = await api.parse(request, read_embeddings)
        embedder = api.texts.embedder
        assert embedder is not None
        fixed = replace(parsed, rows=()).held_bytes(embedder.width)
        _reserve(api, request, len(parsed.rows), fixed, parsed.held_bytes(embedder.width))
        compute = partial(embedder.vectors, width=parsed.width)
        vectors = await api.computed(parsed.rows, lambda row: len(row[0]), compute)
        return StreamingResponse(_sent(api, vectors, parsed.is_base64, parsed.tokens), media_type="application/json")

    async def labels(request: Request) -> Response:
        api.check_endpoint("/v1/classify")
        parsed = await api.parse(request, read_labels)
        labeller = api.texts.labeller
        assert labeller is not None
        num_labels = labeller.trained.held_model.shape.num_labels
        _reserve(api, request, len(parsed.texts), OPEN_BYTES, parsed.held_bytes(num_labels))
        answers = await api.computed(parsed.texts, lambda text: len(text.ids), labeller.answers)
        data = [{"index": index, **answer.columns} for index, answer in enumerate(answers)]
        usage = {"prompt_tokens": parsed.tokens, "total_tokens": parsed.tokens}
        return JSONResponse({"object": "list", "data": data, "model": api.name, "usage": usage})

    async def rerank(request: Request) -> Response:
        api.check_endpoint(RERANK_PATH)
        parsed = await api.parse(request, read_rerank)
        scorer = api.texts.scorer
        assert scorer is not None
        _reserve(api, request, len(parsed.texts), OPEN_BYTES, parsed.held_bytes, "documents")
        scores = await api.computed(parsed.texts, lambda text: len(text.ids), scorer.scores, "documents")
        return JSONResponse(answer_of(parsed, list(map(scorer.share_of, scores)), api.name))

    return [
        route("POST", "/v1/embeddings", embeddings),
        route("POST", "/v1/classify", labels),
        route("POST", RERANK_PATH, rerank),
        route("POST", "/v1/chat/completions", lambda request: _respond(api, request, read_chat, ChatForm(api.name))),
        route("POST", "/v1/completions", lambda request: _respond(api, request, read_completion, Form(api.name))),
        route("GET", "/v1/models", models),
        route("GET", "/v1/models/{name:path}", model),
        route("POST", "/api/chat", question),
        route("GET", "/health", health),
        route("GET", "/metrics", metrics),
    ]


def _reserve(api: Api, request: Request, texts: int, fixed: int, size: int, param: str = "input") -> None:
    """Take the memory of a request for vectors, labels or scores.

    Args:
        fixed: bytes that it holds without texts. size: with them. param: the field that has the texts.
    Raises:
        Refused: it is more than all requests may hold (413). HTTPException: others hold it (429).
    """
    most = api.memory.total_bytes
    if size > most:
        fitting = int(texts * max(0, most - fixed) / (size - fixed))
        text = (
            f"{param}, are {texts} texts; {fitting} like these fit into the memory of a request here; send fewer at "
            f"a time"
        )
        raise Refused(413, text, param)
    reservation_of(request).take(size)


async def _sent(api: Api, vectors: list[Vectors], is_base64: bool, tokens: int) -> AsyncIterator[bytes]:
    """The answer to a request for vectors, one after the other, so that only one is there in JSON."""
    yield b'{"object":"list","data":['
    for index, vector in enumerate(vectors):
        numbers = base64.b64encode(vector.astype("<f4").tobytes()).decode() if is_base64 else vector.tolist()
        one = {"object": "embedding", "index": index, "embedding": numbers}
        yield b"," * (index > 0) + json.dumps(one, separators=(",", ":")).encode()
        if index % VECTORS_AT_ONCE == 0:
            await asyncio.sleep(0)  # other requests go on
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    tail = json.dumps({"model": api.name, "usage": usage}, ensure_ascii=False, separators=(",", ":"))
    yield f"],{tail[1:]}".encode()


async def _respond(api: Api, request: Request, read: Read[AnswerRequest], form: Form) -> Response:
    api.check_endpoint(form.path)
    parsed = await api.parse(request, read)
    flow = api.begin(request, parsed)
    if parsed.is_streamed:
        events = _events(api, flow, form, parsed.tokens if parsed.with_usage else None)
        return StreamingResponse(events, media_type="text/event-stream", headers=STREAM_HEADERS)
    return JSONResponse(form.whole(await _whole(api, request, flow), parsed.tokens))


async def _updates(api: Api, flow: Flow) -> AsyncGenerator[tuple[int, Update], None]:
    """What becomes of the answers of a request, until all have ended; whoever stops reading gives them up.

    Raises:
        Refused: one could not be written.
    """
    loop = asyncio.get_running_loop()
    meters = api.engine.meters
    num_open = len(flow.answers)
    began = loop.time()
    is_first = flow.answers[0].is_streamed
    try:
        while num_open:
            try:
                index, update = await asyncio.wait_for(flow.get(), max(0.0, began + api.seconds - loop.time()))
            except asyncio.TimeoutError:
                raise Refused(504, f"not answered within {api.seconds:g} seconds") from None
            if is_first:
                meters.first_seconds.add(loop.time() - began)
                is_first = False
            if update.problem:
                raise Refused(500 if api.engine.is_alive else 503, update.problem)
            yield index, update
            num_open -= bool(update.end)
    finally:
        for answer in flow.answers:
            answer.is_abandoned = True
        meters.request_seconds.add(loop.time() - began)


async def _whole(api: Api, request: Request, flow: Flow) -> list[Finished]:
    """All answers when the last is done.

    Raises:
        Refused: one could not be written. ClientDisconnect: the client has left, which ends the work.
    """

    async def collect() -> list[Finished]:
        finished = [Finished("", "", 0)] * len(flow.answers)
        async with contextlib.aclosing(_updates(api, flow)) as updates:
            async for index, update in updates:
                text = finished[index].text + update.text
                finished[index] = Finished(text, update.end, len(flow.answers[index].tokens))
        return finished

    async def leave() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    work = asyncio.ensure_future(collect())
    leaving = asyncio.ensure_future(leave())
    try:
        await asyncio.wait((work, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientDisconnect
        return work.result()
    finally:
        work.cancel()
        leaving.cancel()
        await asyncio.gather(work, leaving, return_exceptions=True)


async def _events(api: Api, flow: Flow, form: Form, prompt_tokens: int | None) -> AsyncIterator[bytes]:
    """Server-sent events of a request. Where it fails midway, an event says so.

    Args:
        prompt_tokens: counted at the end; None: not asked for.
    """
    has_begun: set[int] = set()
    try:
        async with contextlib.aclosing(_updates(api, flow)) as updates:
            async for index, update in updates:
                head = b"" if index in has_begun else form.head(index)
                has_begun.add(index)
                part = form.part(index, update.text) if update.text else b""
                yield head + part + (form.tail(index, update.end) if update.end else b"")
    except Refused as failed:
        yield event(problem(failed.status, failed.text))
        return
    if prompt_tokens is not None:
        yield form.count(prompt_tokens, sum(len(answer.tokens) for answer in flow.answers))
    yield END
