"""The list of runs fits its terminal, in both languages; what is left out is told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from board.table import HEAD, lines_of
from language import speak
from terminal import shortened, width

NOW = 1_790_000_000.0


@pytest.fixture(params=["en", "zh"])
def language(request: pytest.FixtureRequest) -> Iterator[str]:
    yield speak(request.param)
    speak("en")


def run(name: str, **more: Any) -> dict[str, Any]:
    facts = {
        "name": name, "state": "running", "step": 12000, "max_steps": 100000, "loss": 2.1234, "eval_loss": 2.25,
        "peak_bytes": 2**30, "budget_bytes": 10 * 2**30, "bytes": 3 * 2**30, "started": NOW - 9e6, "ends": NOW + 9e4,
        "process": 4242, "doing": {},
    }  # fmt: skip
    return {**facts, **more}


RUNS = [
    run("pretrain_20260921_142640"),
    run("训练_" * 20, state="done", ends=None),
    run("one", state="starting", loss=None),
]


@pytest.mark.parametrize("columns", [40, 60, 80, 100, 120])
def test_no_line_is_wider_than_the_terminal(language: str, columns: int) -> None:
    lines = lines_of(RUNS, columns, NOW)
    assert all(width(line) <= columns for line in lines), lines
    assert lines[1].split()[0][0] == "p" and len([line for line in lines if "4242" in line]) == 1


def test_a_wide_one_or_a_pipe_shows_all(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    head, first, *_ = lines = lines_of(RUNS[:1])
    assert lines == lines_of(RUNS[:1], 200) and all(name in head for name in HEAD) and "3.00 GiB" in first


def test_what_is_left_out_is_told() -> None:
    head, *_, told = lines_of(RUNS, 80, NOW)
    assert "loss" in head and "evaluation" in head and "on disk" not in head
    assert "not shown here: " in " ".join(lines_of(RUNS, 80, NOW)) and "--json=True" in told


def test_one_that_prepares_says_how_far_it_is(language: str) -> None:
    doing = {"what": "preparing train", "rows": 12000, "rows_per_second": 3000.4}
    lines = lines_of([run("one", state="starting", started=NOW - 60, doing=doing)], 80, NOW)
    told = " ".join(lines[2:])
    assert "4242" in told and "12,000" in told and "3,000" in told and ("准备" in told) == (language == "zh")
    assert len(lines_of([run("one", state="starting", doing={"rows": "x"})], 200, NOW)) == 3, "nothing but the process"


def test_a_name_keeps_its_beginning_and_its_end() -> None:
    assert shortened("pretrain_20260921_142640", 12) == "pretra…42640"
    assert shortened("short", 5) == "short" and width(shortened("训练的名字很长", 8)) <= 8
