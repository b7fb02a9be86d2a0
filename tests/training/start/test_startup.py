"""A model that has room for many more tokens than its tokenizer knows is told of, where nobody asked for it."""

from __future__ import annotations

from pathlib import Path

from config import load
from data.tokenizers.training import byte_tokenizer
from training.start.startup import _with_vocabulary


def test_room_that_no_token_takes_is_told() -> None:
    for flags, base, is_told in (
        ({}, None, True),
        ({"vocab_size": "8192"}, None, False),
        ({}, Path("model"), False),
        ({"vocab_size": "512"}, None, False),
    ):
        notes: list[str] = []
        config = load("train", {"train_file": "a.txt", "model_preset": "tiny", **flags})
        found = _with_vocabulary(config, byte_tokenizer(), base, notes)
        assert found.model.vocab_size == config.model.vocab_size, "and nothing is changed"
        assert bool(notes) is is_told, flags
        assert all("--vocab_size=384 takes " in note for note in notes)
