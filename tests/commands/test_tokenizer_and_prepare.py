"""The commands that do not train, on small files."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from commands.prepare import prepare
from commands.tokenizer import tokenizer
from data.tokenizers.tokenizer import Tokenizer
from settings.declared import Config
from settings.errors import UserError
from settings.loading import load
from tests.killing import DIED, die_at, run_child


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.jsonl"
    rows = [{"text": f"row {i} says that {i} squared is {i * i}, and the cube {i**3}"} for i in range(300)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def settings(command: str, tmp_path: Path, text_file: Path, **flags: str) -> Config:
    folders = {"cache_dir": str(tmp_path / "cache"), "output_dir": str(tmp_path / "out"), "vocab_size": "400"}
    return load(command, {"train_file": str(text_file), **folders, **flags})


def test_a_tokenizer_is_trained_and_not_overwritten(
    tmp_path: Path, text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer(settings("tokenizer", tmp_path, text_file))
    folder = tmp_path / "out" / "tokenizer"
    words = capsys.readouterr().out
    assert f"--tokenizer_dir={folder}" in words
    assert words.startswith(f"training a bpe tokenizer, to be written to {folder}\n"), "before it takes its time"
    trained = Tokenizer.load(folder)
    assert trained.size <= 400 and trained.decode(trained.encode_batch(["row 7 says"])[0]) == "row 7 says"
    with pytest.raises(UserError, match=r"holds a tokenizer.*--overwrite=True"):
        tokenizer(settings("tokenizer", tmp_path, text_file))
    tokenizer(settings("tokenizer", tmp_path, text_file, overwrite="yes", vocab_size="380"))
    assert Tokenizer.load(folder).size <= 380
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["tokenizer"]


@pytest.mark.skipif(os.name == "nt", reason="os.fork")
def test_a_kill_leaves_no_mixture_of_two_tokenizers(tmp_path: Path, text_file: Path) -> None:
    tokenizer(settings("tokenizer", tmp_path, text_file))
    folder = tmp_path / "out" / "tokenizer"
    old = Tokenizer.load(folder).size
    copy = tmp_path / "kept"
    shutil.copytree(folder, copy)
    byte = settings("tokenizer", tmp_path, text_file, overwrite="True", tokenizer_type="byte")
    sizes = set[int]()
    for number in range(100):

        def again(number: int = number) -> None:
            die_at(number, True)
            tokenizer(byte)

        code = run_child(again)
        if (folder / "tokenizer.json").is_file():
            now, before = ((path / "tokenizer_config.json").read_text() for path in (folder, copy))
            sizes.add(size := Tokenizer.load(folder).size)
            assert (now == before) == (size == old)
        if code == 0:
            break
        assert code == DIED
        shutil.rmtree(folder)
        shutil.copytree(copy, folder)
    assert number > 3 and len(sizes) == 2 and old in sizes
    assert not (folder / ".tmp").exists()


def test_prepare_tells_what_became_of_the_rows(
    tmp_path: Path, text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = settings("prepare", tmp_path, text_file, shards_dir=str(tmp_path / "shards"))
    prepare(config)
    words = capsys.readouterr().out
    assert "span" in words and "train rows" in words and f"--train_file={tmp_path / 'shards'}" in words
    with pytest.raises(UserError, match="holds token shards"):
        tokenizer(settings("tokenizer", tmp_path, tmp_path / "shards"))
    capsys.readouterr()
    of_shards = {"validation_file": str(text_file), "clean": "True", "preview": "1"}
    prepare(settings("prepare", tmp_path, tmp_path / "shards", **of_shards))  # The validation data are cleaned.
    assert "examples exactly as the model receives them" in capsys.readouterr().out
