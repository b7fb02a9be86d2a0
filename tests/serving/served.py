"""An API over a small model inside a test, and a way to hold its model still."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from starlette.testclient import TestClient
from torch import Tensor

from model.decoding.answer_tree import Choices
from model.decoding.generation import generate
from serving import server
from serving.app import Api, make_app
from settings.declared import Config
from settings.loading import load
from tests.training.small_trained import save_trained
from training.loaded_model import LoadedModel, load_model
from training.saved_model import find_model

HERE = "http://127.0.0.1:8400"
NAME = "small"


@lru_cache(maxsize=1)
def folder() -> Path:
    """A small model, made once for a process."""
    path = Path(mkdtemp()) / NAME
    path.mkdir()
    return save_trained(path)


def settings(**flags: Any) -> Config:
    """Of a server over that model."""
    defaults = {"model": folder(), "max_seq_len": 64, "max_new_tokens": 24, "mixed_precision": "no"}
    return load("serve", {name: str(value) for name, value in {**defaults, **flags}.items()})


@lru_cache(maxsize=1)
def trained() -> LoadedModel:
    """The model, loaded once."""
    config = settings()
    return load_model(config, find_model(config))


def api_of(model: LoadedModel, config: Config) -> Api:
    """A server's inside as its settings have it; its engine does not run yet."""
    return server.api_of(
        model,
        config.data,
        config.generate,
        config.answer.generate_batch_size,
        system_prompt=config.chat.system_prompt,
        seed=config.run.seed if config.is_set("seed") else None,
        name_given=str(config.checkpoint.model),
    )


def make_api(queue_limit: int = 8, **flags: Any) -> Api:
    """A server's inside; its engine does not run yet."""
    api = api_of(trained(), settings(**flags))
    api.engine.queue_limit = queue_limit
    return api


@contextmanager
def client_of(api: Api, token: str = "", address: str = HERE) -> Iterator[TestClient]:
    """A client of a running API."""
    with TestClient(make_app(api, token, ("box",)), base_url=address, raise_server_exceptions=False) as client:
        yield client


def alone(ids: Sequence[int], **how: Any) -> str:
    """The text that the command `generate` writes to a prompt."""
    seed = how.pop("seed", 0)
    return trained().tokenizer.decode_answer(
        generate(trained().blockwise.model, [list(ids)], settings(**how).generate, seed=seed)[0]
    )


def prompt_ids(text: str) -> list[int]:
    """A question as the model reads it."""
    result = trained()
    return [*result.tokenizer.encode_batch([text], special=True)[0].tolist(), result.tokenizer.eos_id]


class Gate:
    """Lets an API's model take a step only when it may; before a step that may not be taken, `reached` is set."""

    def __init__(self, api: Api, monkeypatch: Any) -> None:
        self.reached, self.may_go, self.rows = threading.Event(), threading.Event(), []  # type: ignore[var-annotated]
        step = api.engine.decoder.step

        def gated(ids: Sequence[int], choices: Choices | None = None) -> Tensor:
            self.rows.append(len(ids))
            self.reached.set()
            assert self.may_go.wait(60)
            return step(ids, choices)

        monkeypatch.setattr(api.engine.decoder, "step", gated)
