"""Tokens added to a tokenizer of each kind, as `add_tokens` of transformers does it."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece

from data.text.templates import template_of
from data.tokenizers.tokenizer import Tokenizer
from data.tokenizers.training import train_tokenizer
from settings.errors import UserError
from tests.data.tokenizers.test_published import codet5_folder
from tests.data.tokenizers.test_spiece import folder_of

NEW = ["<a_1>", "<a_12>", "Zürich", "</item>"]
TEXTS = ["for <a_1>", "<a_12><a_1> in", "a<a_12> is</item> <a_1>", "class Zürich <extra_id_0>"]
KINDS = ("bpe", "unigram", "byt5", "codet5", "spiece")
FolderOf = Callable[[str], Path]


@pytest.fixture
def folder(tmp_path: Path) -> FolderOf:
    def made(kind: str) -> Path:
        place = tmp_path / kind
        if kind == "codet5":
            return codet5_folder(place)
        if kind == "spiece":
            model = io.BytesIO()
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(["for a class in range is it so"] * 9),
                model_writer=model,
                vocab_size=30,
                pad_id=0,
                eos_id=1,
                unk_id=2,
                bos_id=-1,
                hard_vocab_limit=False,
                num_threads=1,
                minloglevel=2,
            )
            return folder_of(place, model.getvalue(), {"extra_ids": 100})
        if kind == "byt5":
            place.mkdir()
            (place / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByT5Tokenizer"}))
        else:
            train_tokenizer(["for a class in range"] * 9, kind, 700, 2**20).save(place)
        return place

    return made


def extended(folder: Path) -> Path:
    """The folder of a tokenizer with the new tokens, after it was saved once more, as a run saves it."""
    Tokenizer.load(folder).save_extended(NEW, folder.parent / "more")
    Tokenizer.load(folder.parent / "more").save(folder.parent / "saved")
    return folder.parent / "saved"


@pytest.mark.parametrize("kind", KINDS)
def test_added_tokens_take_the_next_ids_and_come_back(folder: FolderOf, kind: str) -> None:
    given = folder(kind)
    base, found = Tokenizer.load(given), Tokenizer.load(extended(given))
    assert [found.token_to_id(token) for token in NEW] == list(range(base.size, base.size + len(NEW)))
    assert found.sentinel_ids == base.sentinel_ids and found.unk_id == base.unk_id
    assert found.encode_batch(["class for"])[0].tolist() == base.encode_batch(["class for"])[0].tolist()
    for how in (found.encode_batch, found.encode_prompts):
        ids = how(["<a_12><a_1>"])[0].tolist()  # type: ignore[operator]
        assert ids[-2:] == [base.size + 1, base.size]
    assert found.decode(found.encode_batch(["Zürich<a_1>"])[0]).strip() == "Zürich<a_1>"


def test_what_lies_beside_a_tokenizer_stays(folder: FolderOf, tmp_path: Path) -> None:
    from settings.declared import DataConfig

    place = folder("bpe")
    config = json.loads((place / "tokenizer_config.json").read_text())
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    (place / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    Tokenizer.load(place).save_extended(NEW, tmp_path / "more")
    assert (
        template_of(DataConfig(), tmp_path / "more")
        == template_of(DataConfig(), place)
        != template_of(DataConfig(), tmp_path)
    )


def test_a_file_without_tokens_is_refused(tmp_path: Path) -> None:
    from data.prepare.data_tokenizer import read_extra_tokens

    for path, content in ((tmp_path / "empty", " \n"), (tmp_path / "none", None)):
        if content is not None:
            path.write_text(content)
        with pytest.raises(UserError, match="extra_tokens"):
            read_extra_tokens(str(path))
    path.write_text("<b>\n\n <a> \r\n<b>\n", newline="")
    assert read_extra_tokens(str(path)) == ["<b>", "<a>"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_gives_the_same_ids(folder: FolderOf, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    place = folder(kind)
    if kind == "codet5":
        (place / "merges.txt").write_text((place / "merges.txt").read_text().rstrip("\n"))  # it reads no blank line
    added, ours = transformers.AutoTokenizer.from_pretrained(place), Tokenizer.load(extended(place))
    assert added.add_tokens(NEW) == len(NEW)
    read = transformers.AutoTokenizer.from_pretrained(extended(place))
    assert len(read) == len(added) == ours.size
    for text, ids in zip(TEXTS, ours.encode_prompts(TEXTS), strict=True):
        assert read(text)["input_ids"][:-1] == added(text)["input_ids"][:-1] == ids.tolist(), text
