"""Nothing that someone else has written controls the terminal."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import pytest

import train_low_mem
from support.screen import GuardedStream, guard, raw

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31mred\r\x08\x7f\u202egnp"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def commands(text: str) -> list[str]:
    return [letter for letter in text if letter in "\x1b\x07\x9b\r\x08\x7f\u202e"]


def test_a_terminal_is_guarded_and_a_pipe_gets_answers_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    errors = io.StringIO()
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", errors)
    with guard():
        print(HOSTILE)
        print(HOSTILE, file=sys.stderr)
        sys.stdout.writelines([HOSTILE])
        assert raw(sys.stdout) is terminal and isinstance(sys.stdout, GuardedStream)
    assert sys.stdout is terminal and not commands(terminal.getvalue() + errors.getvalue())
    assert "\\x1b[2J" in terminal.getvalue() and "\\x1b[2J" in errors.getvalue()
    monkeypatch.setattr(sys, "stdout", pipe)
    with guard():
        print(HOSTILE)
    assert pipe.getvalue() == HOSTILE + "\n"


def test_an_error_that_quotes_data_and_names_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = "a\x1b]0;owned\x07.jsonl" if os.name != "nt" else "a.jsonl"
    (tmp_path / name).write_text(json.dumps({HOSTILE: "x"}) + "\n")
    code = train_low_mem.main(["prepare", f"--train_file={name}", "--objective=span"])
    message = "".join(capsys.readouterr())
    assert code == 2 and "owned" in message and not commands(message)
