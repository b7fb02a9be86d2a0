"""Tokenizers and cells that someone else has made: what fails inside of them is told with the file's name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fuzzing.sound_tokenizers import bpe_folder, byte_bpe_folder
from data.text.conversations import turns_of
from data.tokenizers.tokenizer import Tokenizer
from settings.errors import UserError

DEEP = "[" * 100_000 + "]" * 100_000


def changed(folder: Path, **changes: Any) -> Path:
    bpe_folder(folder)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return path


@pytest.mark.parametrize("step", ["pre_tokenizer", "normalizer"])
def test_a_regular_expression_that_panics_names_its_file(tmp_path: Path, step: str) -> None:
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    replace = {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "b"}
    path = changed(tmp_path / "x", **{step: split if step == "pre_tokenizer" else replace})
    with pytest.raises(UserError, match=rf"{path}: fails at a text \(.*retry-limit"):
        Tokenizer.load(path).encode_batch(["a" * 60 + "!"])


def test_absurd_ids_are_refused_before_tables_are_made(tmp_path: Path) -> None:
    byte_bpe_folder(tmp_path / "x")
    path = tmp_path / "x" / "vocab.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "<pad>": 2**31}))
    with pytest.raises(UserError, match="has ids up to 2,147,483"):
        Tokenizer.load(tmp_path / "x")


def test_deep_nesting_is_no_traceback(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no list of turns"):
        turns_of(DEEP)
    bpe_folder(tmp_path / "x")
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        (tmp_path / "x" / name).write_text(DEEP)
        with pytest.raises(UserError, match=r"(map|config)\.json: cannot be read"):
            Tokenizer.load(tmp_path / "x")
        (tmp_path / "x" / name).write_text("{}")
    (tmp_path / "x" / "prompt_template.json").write_text(DEEP)
    with pytest.raises(UserError, match=r"prompt_template\.json: cannot be read"):
        Tokenizer.load(tmp_path / "x")
