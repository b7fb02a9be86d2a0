"""The list of runs fits its terminal, in both languages; what is left out is named below it."""

from __future__ import annotations

from typing import Any

import pytest

from board.commands import lines_of
from support.language import speak
from support.terminal import width

NOW = 1_790_000_000.0
FACTS = {
    "state": "running",
    "step": 12000,
    "max_steps": 100000,
    "loss": 2.1234,
    "eval_loss": 2.25,
    "peak_bytes": 2**30,
    "budget_bytes": 10 * 2**30,
    "bytes": 3 * 2**30,
    "started": NOW - 9e6,
    "ends": NOW + 9e4,
    "process": 4242,
    "doing": {},
    "reason": "",
}


def run(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, **FACTS, **more}


DOING = {"what": "preparing train", "rows": 12000, "rows_per_second": 3000.4}
RUNS = [
    run("pretrain_20260921_142640"),
    run("训练_" * 20, state="done", ends=None),
    run("two", state="failed", reason="--finetune_from = a,\nhas no decoder " + "x " * 300),
    run("one", state="starting", loss=None, started=NOW - 60, doing=DOING),
]


@pytest.mark.parametrize("language", ["en", "zh"])
def test_no_line_is_wider_than_the_terminal(language: str) -> None:
    speak(language)
    try:
        for columns in (40, 80, 120):
            lines = lines_of(RUNS, columns, NOW)
            assert all(width(line) <= columns for line in lines), lines
            text = " ".join(" ".join(lines).split())
            assert lines[1].startswith("p") and "4242" in text and "12,000" in text and "3,000" in text
            assert "two failed: " in text or "two 失败" in text
    finally:
        speak("en")
