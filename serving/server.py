"""The API's server: the model is loaded inside the budget, and SIGTERM ends it cleanly."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from commands.embed import Embedder, with_preparation
from commands.loading import Trained, check_one_process, find_answering, load_trained, watched, writing_of
from language import join, say
from memory.estimate.generation import (
    LOSS_LIBRARIES_BYTES,
    MOST_ROWS,
    REQUEST_BYTES,
    Capacity,
    Writing,
    serving_capacity,
)
from serving.app import READING_BYTES, Api, make_app
from serving.asking import Texts, request_bytes
from serving.engine import MOST_WAITING, Engine
from settings.declared import Config
from settings.fields import AUTO
from training.evaluation.answers import decoder_of
from training.setup.answer_list import with_answers
from units import format_size
from web.bodies import ByteBudget
from web.listening import Server, address_of, listen, own_names, server_of, token_of

PORT = 8400
LEAVE_SECONDS = 30  # given to open answers at the end


def serve(config: Config) -> None:
    """Serve a model until SIGINT or SIGTERM: open requests are answered for `LEAVE_SECONDS` more.

    Raises:
        UserError: the model is not usable, or the address cannot be listened at. DoesNotFit: the budget does not hold
            one answer.
    """
    check_one_process("serve")
    board = config.board
    token = token_of(board.token, board.host, "use this model")
    config, model = find_answering(config, searches=False)
    config, tree = with_answers(config, model)
    is_text = model.shape.is_text
    config = config if is_text else with_preparation(config, model)
    with listen(board.host, PORT if board.port == AUTO else int(board.port)) as listener:
        trained = load_trained(config, model, writing_of(config, 1) if is_text else Writing(1, 1, 1), tree)
        api = api_of(trained, config)
        for line in _greeting(api, trained, address_of(board.host, listener), token):
            print(line, flush=True)
        server = server_of(make_app(api, token, own_names(board.host)), LEAVE_SECONDS)
        with watched(trained.monitor, "--generate_batch_size=1"):
            with _ending_is_success(server):
                server.run(sockets=[listener])
            print(say("stopped; peak memory {size}", size=format_size(trained.monitor.peak_bytes)), flush=True)


@contextmanager
def _ending_is_success(server: Server) -> Iterator[None]:
    """uvicorn ends at SIGTERM and SIGINT, and raises the signal anew behind that; here it has done all that it should."""

    def end(number: int, frame: object) -> None:
        server.should_exit = True

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def api_of(trained: Trained, config: Config) -> Api:
    """Everything behind the addresses, made of a loaded model; its engine does not run yet.

    Raises:
        DoesNotFit: the budget does not hold one answer of the longest.
    """
    decoder = decoder_of(trained.blockwise) if trained.shape.is_text else None
    embedder = Embedder.of(trained, config)
    if decoder is None:
        capacity, request_memory = (
            Capacity(0, 0, {"weights": trained.loaded.weights.bytes}),
            _requests_beside_vectors(trained, config),
        )
        embedder = replace(embedder, beside_bytes=READING_BYTES + request_memory)
    else:
        capacity = _capacity(trained, config)
        request_memory = capacity.parts["requests"] - READING_BYTES
        if (
            not trained.room.budget.is_on_device
        ):  # of what the plan leaves, half, as the heap may take more than planned
            request_memory += max(0, trained.room.total_bytes - sum(capacity.parts.values())) // 2
    engine = Engine(decoder, capacity, trained.monitor, trained.device, trained.tree)
    texts = Texts(trained.tokenizer, trained.template, config.data.max_seq_len, config.chat.system_prompt, embedder)
    name = trained.loaded.folder.resolve().name
    written = trained.loaded.folder / "config.json"
    made = int(written.stat().st_mtime) if written.is_file() else 0
    return Api(
        engine, texts, name, made, ByteBudget(request_memory), config.generate,
        seed=config.run.seed if config.given("seed") else None,
        other_names=frozenset([str(config.checkpoint.model), str(trained.loaded.folder), str(trained.loaded.folder.resolve())]),
    )  # fmt: skip


def _requests_beside_vectors(trained: Trained, config: Config) -> int:
    """What requests may hold beside an encoder: as much as waiting ones take, or a quarter of what its weights leave."""
    least = REQUEST_BYTES * (1 + MOST_WAITING)
    if trained.room.budget.is_on_device:
        return least
    room = trained.room
    left = room.total_bytes - room.base_bytes - trained.loaded.weights.bytes - LOSS_LIBRARIES_BYTES - READING_BYTES
    return max(least, left // 4)


def _capacity(trained: Trained, config: Config) -> Capacity:
    asked: Any = config.answer.generate_batch_size
    choices = 0 if trained.tree is None else trained.tree.most_choices(1)
    longest = replace(writing_of(config, MOST_ROWS if asked == AUTO else int(asked)), sampled=True, choices=choices)

    def capacity(asked: Writing, total_bytes: int) -> Capacity | None:
        waiting = REQUEST_BYTES * (1 + MOST_WAITING)
        one_more = max(0, request_bytes(asked.source_tokens, 1, asked.new_tokens) - waiting)
        reading = READING_BYTES + one_more
        return serving_capacity(
            trained.shape, trained.loaded.weights, asked, trained.room.base_bytes, total_bytes, MOST_WAITING, reading
        )

    found = capacity(longest, trained.room.total_bytes)
    if found is None:
        one = replace(longest, rows=1)
        needed = capacity(one, 2**62)
        assert needed is not None
        raise trained.too_little(one, parts=needed.parts)
    return found


def _greeting(api: Api, trained: Trained, address: str, token: str) -> list[str]:
    lines: list[str] = [
        say("serving {name} at {address}/v1  (stop with Ctrl-C or SIGTERM)", name=api.name, address=address)
    ]
    key: list[str] = [say("key: {key}", key=token)] if token else []
    if api.engine.decoder is None:
        told = "vectors of {width} numbers, of texts of at most {longest} tokens"
        width = f"{trained.blockwise.model.config.d_model:,}"
        return [*lines, say(told, width=width, longest=f"{api.texts.longest:,}"), *key]
    capacity, room = api.engine.capacity, trained.room
    longest, new = api.texts.longest, api.defaults.max_new_tokens
    parts = join(", ", [join(" ", [say(name), format_size(size)]) for name, size in capacity.parts.items() if size])
    lines += [
        say(
            "capacity: {rows} concurrent answers, {tokens} tokens of prompts and answers (at most {longest} each, "
            "{prompt} + {answer}); queue of {waiting}",
            rows=capacity.rows, tokens=f"{capacity.tokens:,}", longest=capacity.tokens // (longest + new), prompt=longest,
            answer=new, waiting=api.engine.queue_limit,
        ),
        say(
            "memory: {planned} planned of {budget}: {parts}",
            planned=format_size(sum(capacity.parts.values())), budget=format_size(room.total_bytes), parts=parts,
        ),
    ]  # fmt: skip
    return [*lines, *key]
