"""How a run has ended stands in its log, in English, a line for each of its sentences."""

from __future__ import annotations

import pytest

from config import UserError
from language import say, speak
from training.report.endings import Interrupted
from training.report.journal import _ending_words


@pytest.fixture
def chinese() -> object:
    speak("zh")
    yield
    speak("en")


@pytest.mark.usefixtures("chinese")
@pytest.mark.parametrize(
    ("error", "words"),
    [
        (None, ["ended: all done"]),
        (
            Interrupted(say("stopped after step {step}, saved in {folder}; continue with\n  {command}", step=3, folder="f", command="c d")),
            ["ended: stopped after step 3, saved in f; continue with", "ended: c d"],
        ),
        (KeyboardInterrupt(), ["ended: interrupted"]),
        (UserError("--a = 1, is wrong", "--b = 2, too"), ["ended: --a = 1, is wrong", "ended: --b = 2, too"]),
        (ValueError("a crash"), []),
    ],
)  # fmt: skip
def test_the_log_says_how_a_run_ended(error: BaseException | None, words: list[str]) -> None:
    assert _ending_words(error) == words
