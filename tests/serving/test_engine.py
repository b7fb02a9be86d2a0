"""Requests that come at any time are written together, each as it would be alone, and never more than fits."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from memory.answers import AnswerBatch, HeldModel
from serving.answers import Answer, Refused, Update
from serving.app import Api
from serving.server import capacity_of
from support.units import GIB, MIB
from tests.serving.served import Gate, alone, make_api, prompt_ids
from tests.training.small_trained import SHAPE

pytestmark = pytest.mark.usefixtures("one_thread")
QUESTIONS = ["hello", "a somewhat longer question than that", "x", "河水从桥下流过", "two words"]


@dataclass
class Ear:
    """What one answer has sent."""

    heard: list[Update] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def __call__(self, update: Update) -> None:
        self.heard.append(update)
        if update.end or update.problem:
            self.ended.set()

    def text(self) -> str:
        """The whole answer, awaited."""
        assert self.ended.wait(60)
        assert not self.heard[-1].problem, self.heard[-1].problem
        return "".join(update.text for update in self.heard)


def ask(api: Api, question: str, seed: int = 0, **how: Any) -> tuple[Answer, Ear]:
    """An answer that is not submitted yet."""
    ear = Ear()
    return Answer(prompt_ids(question), replace(api.defaults, **how), seed, decode=api.texts.decode, send=ear), ear


@pytest.fixture
def api() -> Any:
    api = make_api()
    yield api
    if api.engine.is_alive:
        api.engine.stop()


def test_answers_are_those_given_alone(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """They join one by one while others are being written, each by its own settings."""
    settings: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "seed": 4},
        {"repetition_penalty": 2.0},
        {"no_repeat_ngram_size": 1},
    ]
    gate = Gate(api, monkeypatch)
    gate.may_go.set()
    answers = [ask(api, question, **how) for how in settings for question in QUESTIONS]
    api.engine.queue_limit = len(answers)
    api.engine.submit([answer for answer, _ in answers])
    api.engine.start()
    expected = [alone(prompt_ids(question), **how) for how in settings for question in QUESTIONS]
    assert [ear.text() for _, ear in answers] == expected
    assert gate.rows[:3] == [1, 2, 3], "one joins before each step"


def test_no_more_rows_and_tokens_than_fit(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = max(map(len, map(prompt_ids, QUESTIONS))) + api.defaults.max_new_tokens
    for capacity, most in (
        (replace(api.engine.capacity, rows=2), 2),
        (replace(api.engine.capacity, tokens=needed), 1),
    ):
        api = make_api()
        api.engine.capacity = capacity
        gate = Gate(api, monkeypatch)
        gate.may_go.set()
        answers = [ask(api, question) for question in QUESTIONS]
        api.engine.submit([answer for answer, _ in answers])
        api.engine.start()
        assert [ear.text() for _, ear in answers] == [alone(prompt_ids(question)) for question in QUESTIONS]
        assert max(gate.rows) == most
        api.engine.stop()


def test_one_prompt_that_fails_leaves_the_others(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    (good, heard), (bad, failed) = ask(api, "hello"), ask(api, "x")
    bad.ids = (10**6, 1)
    api.engine.submit([bad, good])
    api.engine.start()
    assert heard.text() == alone(prompt_ids("hello"))
    assert failed.ended.wait(60) and "outside of the model's vocabulary" in failed.heard[-1].problem
    assert "an answer failed" in capsys.readouterr().out


def test_want_of_memory_is_met_by_freeing_and_trying_again(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    step, failures = api.engine.decoder.step, iter([True])

    def failing(*arguments: Any) -> Any:
        if next(failures, False):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 5 bytes")
        return step(*arguments)

    monkeypatch.setattr(api.engine.decoder, "step", failing)
    (first, ear), (second, after) = ask(api, "hello"), ask(api, "x")
    api.engine.submit([first])
    api.engine.start()
    assert ear.text() == alone(prompt_ids("hello"))
    api.engine.submit([second])
    assert after.text() == alone(prompt_ids("x")), "the server goes on"


def test_the_queue_has_a_limit_and_takes_a_request_whole_or_not_at_all(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.engine.capacity = replace(api.engine.capacity, rows=1)
    gate = Gate(api, monkeypatch)
    api.engine.start()
    first, _ = ask(api, "x")
    api.engine.submit([first])
    assert gate.reached.wait(60)
    api.engine.submit([ask(api, "x")[0] for _ in range(7)])
    with pytest.raises(Refused):
        api.engine.submit([ask(api, "x")[0] for _ in range(2)])
    assert api.engine.waiting == 7
    last, ear = ask(api, "hello")
    api.engine.submit([last])
    gate.may_go.set()
    assert ear.text() == alone(prompt_ids("hello"))


def test_the_budget_says_how_much_is_written_at_once() -> None:
    longest = AnswerBatch(64, 512, 128, sampled=True)
    shape = replace(SHAPE, d_kv=64, num_heads=8, num_decoder_layers=6)
    model_held = HeldModel.of(shape, "float32", "float32", 200 * MIB)
    token = 2 * 6 * 8 * 64 * 4
    wide = capacity_of(model_held, longest, 4 * GIB, 8 * MIB)
    assert wide is not None and (wide.rows, wide.tokens) == (64, 64 * 640)
    assert sum(wide.parts.values()) <= 4 * GIB
    narrow = capacity_of(model_held, longest, 512 * MIB, 8 * MIB)
    assert narrow is not None and 640 <= narrow.tokens < wide.tokens
    assert sum(narrow.parts.values()) <= 512 * MIB < sum(narrow.parts.values()) + 2 * token
    assert capacity_of(model_held, longest, 230 * MIB, 8 * MIB) is None
    reading = capacity_of(model_held, longest, 512 * MIB, 28 * MIB)
    assert reading is not None and 15 * MIB < (narrow.tokens - reading.tokens) * token <= 20 * MIB
    few = capacity_of(model_held, replace(longest, rows=3), 4 * GIB, 8 * MIB)
    assert few is not None and few.rows == 3
