"""The API's server: the model is loaded inside the budget, and SIGTERM ends it cleanly."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from commands.answering import find_answering
from commands.document_scorer import Answers, DocumentScorer, answers_of, can_score, scorer_of
from commands.generate import LEAST_TEXT
from commands.text_reader import LENGTH_MULTIPLE, Embedder, Labeller
from devices.sizes import ANSWERED_TOGETHER, few_places
from memory.answers import AnswerBatch, HeldModel, largest
from memory.monitor import watched
from serving.app import READING_BYTES, Api, make_app
from serving.asking import Texts, request_bytes
from serving.engine import MOST_WAITING, AnswerEngine, Capacity
from serving.reranking import PATH as RERANK_PATH
from settings.declared import Config, DataConfig, EmbedConfig, GenerateConfig
from settings.fields import AUTO, Auto, listed
from settings.tasks import MODEL_HEADS
from support.language import join, say
from support.units import KIB, format_size
from support.web.bodies import ByteBudget
from support.web.listening import Server, address_of, listen, own_names, server_of, token_of
from training.evaluation.answers import new_decoder
from training.loaded_model import LoadedModel

PORT = 8400
REQUEST_BYTES = 128 * KIB  # of an accepted request: its text, tokens and connection
LEAVE_SECONDS = 30  # given to open answers at the end


def serve(config: Config) -> None:
    """Serve a model until SIGINT or SIGTERM: open requests are answered for `LEAVE_SECONDS` more.

    Raises:
        UserError: the model is not usable, or the address cannot be listened at. DoesNotFit: the budget does not hold
            one answer.
    """
    board = config.board
    token = token_of(board.token, board.host, "use this model")
    answering = find_answering(config, "serve")
    config = answering.config
    with listen(board.host, PORT if board.port == AUTO else int(board.port)) as listener:
        writes_text = MODEL_HEADS[answering.model.shape.head].writes_text
        trained = answering.load(None if writes_text else LEAST_TEXT)
        api = api_of(
            trained,
            config.data,
            config.generate,
            config.answer.generate_batch_size,
            system_prompt=config.chat.system_prompt,
            seed=config.run.seed if config.is_set("seed") else None,
            name_given=str(config.checkpoint.model),
            answers=answers_of(config, answering.model, default=None) if writes_text else None,
            embed=config.embed,
        )
        for line in _greeting(api, trained, address_of(board.host, listener), token):
            print(line, flush=True)
        server = server_of(make_app(api, token, own_names(board.host)), LEAVE_SECONDS)
        with watched(trained.monitor, "--generate_batch_size=1"):
            with _ending_is_success(server):
                server.run(sockets=[listener])
            print(say("stopped; peak memory {size}", size=format_size(trained.monitor.peak_bytes)), flush=True)


@contextmanager
def _ending_is_success(server: Server) -> Iterator[None]:
    """uvicorn ends at SIGTERM and SIGINT, and raises the signal anew behind that; here it has done all that it
    should.
    """

    def end(number: int, frame: object) -> None:
        server.should_exit = True

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def api_of(
    trained: LoadedModel,
    data: DataConfig,
    generate: GenerateConfig,
    rows: int | Auto = AUTO,
    *,
    system_prompt: str | None = None,
    seed: int | None = None,
    name_given: str = "",
    answers: Answers | None = None,
    embed: EmbedConfig | None = None,
) -> Api:
    """Everything behind the addresses, made of a loaded model; its engine does not run yet.

    Args:
        data: how texts are read, and how long prompts may be. generate: how tokens are chosen where a request says
            nothing.
        rows: most answers at once. name_given: by which requests may name the model, beside the name of its folder.
        system_prompt: instructions where a request has none. seed: of requests that name none.
        answers: of a T5 that says by one of two how relevant a document is; None: it does not.
        embed: of the vectors of requests that say nothing else; None: as by default.
    Raises:
        DoesNotFit: the budget does not hold one answer of the longest.
    """
    shape = trained.held_model.shape
    embedder = Embedder(trained, data, settings=embed)
    limit = trained.budget.limit()
    if MODEL_HEADS[shape.head].writes_text:
        decoder = new_decoder(trained.blockwise)
        capacity = _capacity(trained, AnswerBatch.by(generate, 1, data.max_seq_len), rows)
        request_memory = capacity.parts["requests"] - READING_BYTES
        # The heap may take more than planned, so that half of what the plan leaves stays free.
        spare = (limit - sum(capacity.parts.values())) // 2
    else:
        decoder = None
        capacity = Capacity(0, 0, {"weights": trained.held_model.weight_bytes})
        request_memory = REQUEST_BYTES * (1 + MOST_WAITING)
        # The other three quarters are for the texts that are being read.
        spare = (limit - sum(embedder.predicted_memory(LENGTH_MULTIPLE).values()) - READING_BYTES) // 4
    if not trained.budget.is_on_device:
        request_memory += max(0, spare)
    if decoder is None:
        embedder.beside_bytes = READING_BYTES + request_memory
    labeller = None
    if shape.num_labels:
        labeller = Labeller(trained, data, rows)
        labeller.beside_bytes = embedder.beside_bytes
    scorer: DocumentScorer | None = None
    if answers is not None or (labeller is not None and can_score(shape)):
        scorer = scorer_of(trained, data, answers)
        scorer.beside_bytes = embedder.beside_bytes
    engine = AnswerEngine(decoder, capacity, trained.monitor, trained.device, trained.tree)
    texts = Texts(trained.tokenizer, trained.template, data.max_seq_len, system_prompt, embedder, labeller, scorer)
    folder = trained.folder.resolve()
    return Api(
        engine,
        texts,
        folder.name,
        int(folder.stat().st_mtime),
        ByteBudget(request_memory),
        generate,
        seed=seed,
        other_names=frozenset([name_given, str(trained.folder), str(folder)]),
    )


def capacity_of(model: HeldModel, longest: AnswerBatch, budget_bytes: int, reserved_bytes: int) -> Capacity | None:
    """How many rows, and tokens of them, a budget holds; None where not even one of the longest fits.

    Args:
        longest: the most rows, the longest prompt and answer.
        reserved_bytes: of requests beside those that are being answered.
    """
    one = longest.source_tokens + longest.new_tokens

    def parts(rows: int, tokens: int) -> dict[str, int]:
        # Prompts are read one by one, between two steps.
        answering = model.answering(replace(longest, rows=rows), rows_read=1, cached_tokens=tokens)
        return {**answering, "requests": reserved_bytes + REQUEST_BYTES * rows}

    def fits(rows: int, tokens: int) -> bool:
        return sum(parts(rows, tokens).values()) <= budget_bytes

    rows = largest(longest.rows, lambda rows: fits(rows, one))
    if not rows:
        return None
    tokens = largest(few_places(rows) * one, lambda tokens: fits(rows, tokens))
    return Capacity(rows, tokens, parts(rows, tokens))


def _capacity(trained: LoadedModel, one: AnswerBatch, rows: int | Auto) -> Capacity:
    """What the budget holds of the longest answers. What requests may hold at least stays free for them.

    Args:
        one: the longest answer.
    """
    most = ANSWERED_TOGETHER if rows == AUTO else min(int(rows), ANSWERED_TOGETHER)
    choices = 0 if trained.tree is None else trained.tree.most_choices(1)
    one = replace(one, sampled=True, choices=choices)
    largest_request = request_bytes(one.source_tokens, 1, one.new_tokens)
    reserved_bytes = READING_BYTES + max(REQUEST_BYTES * MOST_WAITING, largest_request - REQUEST_BYTES)
    capacity = capacity_of(trained.held_model, replace(one, rows=most), trained.budget.limit(), reserved_bytes)
    if capacity is None:
        needed = capacity_of(trained.held_model, one, 2**62, reserved_bytes)
        assert needed is not None
        raise trained.too_little(one, needed.parts)
    return capacity


def _greeting(api: Api, trained: LoadedModel, address: str, token: str) -> list[str]:
    lines: list[str] = [
        say("serving {name} at {address}/v1  (stop with Ctrl-C or SIGTERM)", name=api.name, address=address)
    ]
    last_lines: list[str] = []
    if api.texts.scorer is not None:
        last_lines.append(say("documents by relevance at POST {path}", path=RERANK_PATH))
    if token:
        last_lines.append(say("key: {key}", key=token))
    if api.engine.decoder is None:
        text = "vectors of {width} numbers, from texts of at most {longest} tokens"
        embedder = api.texts.embedder
        assert embedder is not None
        lines.append(say(text, width=f"{embedder.width:,}", longest=f"{api.texts.longest:,}"))
        prompt = embedder.prompts[embedder.prompt_name]
        if prompt:
            text = "before each text: {prompt!r} (--prompt_name={name})"
            lines.append(say(text, prompt=prompt, name=embedder.prompt_name))
        if api.texts.labeller is not None:
            names = trained.held_model.shape.label_names
            lines.append(say("labels of texts ({labels}) at POST /v1/classify", labels=listed(names) or say("number")))
        return [*lines, *last_lines]
    capacity = api.engine.capacity
    longest = api.texts.longest
    new = api.defaults.max_new_tokens
    parts = join(", ", [join(" ", [say(name), format_size(size)]) for name, size in capacity.parts.items() if size])
    lines += [
        say(
            "capacity: {rows} concurrent answers, {tokens} tokens of prompts and answers (at most {longest} each, "
            "{prompt} + {answer}); queue of {waiting}",
            rows=capacity.rows,
            tokens=f"{capacity.tokens:,}",
            longest=capacity.tokens // (longest + new),
            prompt=longest,
            answer=new,
            waiting=api.engine.queue_limit,
        ),
        say(
            "memory: {planned} planned of {budget}: {parts}",
            planned=format_size(sum(capacity.parts.values())),
            budget=format_size(trained.budget.limit()),
            parts=parts,
        ),
    ]
    return [*lines, *last_lines]
