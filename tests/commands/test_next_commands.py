"""What a command tells the user to type next can be typed: it takes a model of that kind."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from commands.convert import next_command
from settings.program import program
from tests.training.small_trained import SHAPE, save_trained
from train_low_mem import main
from training.report.summary import next_commands

pytestmark = pytest.mark.usefixtures("one_thread")
KINDS: dict[str, dict[str, Any]] = {
    "text": {},
    "classifier": {"head": "sequence", "labels": "few,many", "num_decoder_layers": 0},
    "encoder": {"head": "none", "num_decoder_layers": 0},
    "embedding": {"head": "embedding", "num_decoder_layers": 0},
}
ROWS: dict[str, dict[str, Any]] = {
    "text": {"prompt": "a", "response": "b"},
    "classifier": {"text": "a b", "label": "few"},
    "embedding": {"anchor": "a b", "positive": "b a"},
}


def words_of(line: str) -> list[str]:
    assert line.startswith(program())
    return shlex.split(line.removeprefix(program()))


@pytest.mark.parametrize("kind", KINDS)
def test_the_command_takes_a_model_of_this_kind(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shape = replace(SHAPE, **KINDS[kind])
    folder = save_trained(tmp_path / "my model", shape=shape)
    lines = [next_command(shape, folder)]
    if kind != "encoder":  # Nothing trains an encoder without a head.
        lines += next_commands(str(folder), shape.head, False, "it's a prompt")
    assert all("--input=" in line or " evaluate " in line for line in lines)
    for line in lines:
        words = words_of(line)
        if words[0] == "evaluate":  # A run has rows of its own.
            (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS[kind]) + "\n")
            words += ["--validation_file=rows.jsonl"]
        assert main([*words, "--mixed_precision=no"]) == 0, capsys.readouterr().err
