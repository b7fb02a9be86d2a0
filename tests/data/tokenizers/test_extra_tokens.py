"""Tokens added to a tokenizer of each kind, as `add_tokens` of transformers does it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from data.tokenizers.tokenizer import Tokenizer
from data.tokenizers.training import train_tokenizer
from tests.data.tokenizers.models import folder_of, sentencepiece_model
from tests.data.tokenizers.test_published import codet5_folder

NEW = ["<a_1>", "<a_12>", "Zürich", "</item>"]
TEXTS = ["for <a_1>", "<a_12><a_1> in", "a<a_12> is</item> <a_1>", "class Zürich <extra_id_0>"]
KINDS = ("bpe", "unigram", "byt5", "codet5", "spiece")
FolderOf = Callable[[str], Path]


@pytest.fixture
def folder(tmp_path: Path) -> FolderOf:
    def make(kind: str) -> Path:
        path = tmp_path / kind
        if kind == "codet5":
            return codet5_folder(path)
        if kind == "spiece":
            proto = sentencepiece_model(["for a class in range is it so"] * 9, 30)
            return folder_of(path, proto, {"extra_ids": 100})
        if kind == "byt5":
            path.mkdir()
            (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByT5Tokenizer"}))
        else:
            train_tokenizer(["for a class in range"] * 9, kind, 700, 2**20).save(path)
        return path

    return make


def extended(folder: Path) -> Path:
    """The folder of a tokenizer with the new tokens, after it was saved once more, as a run saves it."""
    Tokenizer.load(folder).save_extended(NEW, folder.parent / "more")
    Tokenizer.load(folder.parent / "more").save(folder.parent / "saved")
    return folder.parent / "saved"


@pytest.mark.parametrize("kind", KINDS)
def test_added_tokens_take_the_next_ids_and_come_back(folder: FolderOf, kind: str) -> None:
    published = folder(kind)
    base, more = Tokenizer.load(published), Tokenizer.load(extended(published))
    assert [more.token_to_id(token) for token in NEW] == list(range(base.size, base.size + len(NEW)))
    assert more.sentinel_ids == base.sentinel_ids and more.unk_id == base.unk_id
    assert more.encode_batch(["class for"])[0].tolist() == base.encode_batch(["class for"])[0].tolist()
    for (ids,) in (more.encode_batch(["<a_12><a_1>"]), more.encode_prompts(["<a_12><a_1>"])):
        assert ids[-2:].tolist() == [base.size + 1, base.size]
    assert more.decode(more.encode_batch(["Zürich<a_1>"])[0]).strip() == "Zürich<a_1>"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_gives_the_same_ids(folder: FolderOf, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    path = folder(kind)
    if kind == "codet5":
        (path / "merges.txt").write_text((path / "merges.txt").read_text().rstrip("\n"))  # It reads no blank line.
    added, ours = transformers.AutoTokenizer.from_pretrained(path), Tokenizer.load(extended(path))
    assert added.add_tokens(NEW) == len(NEW)
    read = transformers.AutoTokenizer.from_pretrained(extended(path))
    assert len(read) == len(added) == ours.size
    for text, ids in zip(TEXTS, ours.encode_prompts(TEXTS), strict=True):
        assert read(text)["input_ids"][:-1] == added(text)["input_ids"][:-1] == ids.tolist(), text
