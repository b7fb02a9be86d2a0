"""Small files and settings that the tests of the data wing share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from data.tokenizers.training import byte_tokenizer
from settings.declared import Config
from settings.loading import load

Configure = Callable[..., Config]
settings.register_profile("untimed", deadline=None, max_examples=40)  # Other work on the machine must not fail a test.
settings.load_profile("untimed")


@pytest.fixture
def byte_dir(tmp_path: Path) -> Path:
    """A tokenizer that needs no training."""
    byte_tokenizer().save(tmp_path / "byte")
    return tmp_path / "byte"


@pytest.fixture
def configure(tmp_path: Path, byte_dir: Path) -> Configure:
    """Settings of a training run that keeps everything under the test's folder and uses the byte tokenizer."""

    def make(**flags: Any) -> Config:
        defaults = {"cache_dir": str(tmp_path / "cache"), "tokenizer_dir": str(byte_dir), "max_seq_len": 64}
        return load("train", {**defaults, **{name: str(value) for name, value in flags.items()}})

    return make


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    """300 documents in column `text`, each with its own number."""
    path = tmp_path / "text.jsonl"
    rows = [{"text": f"document {number}: " + "all work and no play " * (1 + number % 7)} for number in range(300)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf8")
    return path


@pytest.fixture
def pairs_file(tmp_path: Path) -> Path:
    """250 pairs of different length."""
    path = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"p{number} " + "x" * (number % 37), "response": f"r{number}"} for number in range(250)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf8")
    return path
