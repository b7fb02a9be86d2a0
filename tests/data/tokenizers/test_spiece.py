"""Published SentencePiece models and the files beside them; SentencePiece itself is the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece

from benchmarks.checks.tokenizer_ids import KINDS, differing, texts
from data.prepare.encode import TextEncoder
from data.tokenizers.pieces import pieces as as_they_come
from data.tokenizers.tokenizer import Tokenizer
from tests.data.tokenizers.models import folder_of, sentencepiece_model

SENTINELS = [f"<extra_id_{number}>" for number in range(100)]


@pytest.fixture(scope="module")
def proto() -> bytes:
    sentences = texts(300, 1, long_letters=100)
    return sentencepiece_model(sentences, 6000, character_coverage=0.98, byte_fallback=True)


@pytest.fixture(scope="module")
def reference(proto: bytes) -> sentencepiece.SentencePieceProcessor:
    """The library that defines the ids."""
    return sentencepiece.SentencePieceProcessor(model_proto=proto)


@pytest.mark.parametrize(
    "config, added, num_sentinels, beyond",
    [
        ({}, {}, 100, 100),
        ({"extra_ids": 0, "additional_special_tokens": None}, {}, 0, 0),
        ({"extra_ids": 100, "additional_special_tokens": SENTINELS}, {"{": 101, "\n": 100}, 100, 102),
        ({"tokenizer_class": "LlamaTokenizer"}, {}, 0, 0),
    ],
)
def test_added_tokens_have_the_ids_that_transformers_4_gives(
    tmp_path: Path,
    proto: bytes,
    reference: sentencepiece.SentencePieceProcessor,
    config: dict[str, Any],
    added: dict[str, int],
    num_sentinels: int,
    beyond: int,
) -> None:
    size = reference.get_piece_size()
    added_tokens = {text: size + number for text, number in added.items()}
    ours = Tokenizer.load(folder_of(tmp_path / "model", proto, config, added_tokens=added_tokens))
    assert (ours.size, ours.num_sentinels) == (size + beyond, num_sentinels)
    assert list(ours.sentinel_ids) == list(range(size + num_sentinels - 1, size - 1, -1))
    for text, number in added_tokens.items():
        assert ours.encode_batch([f"a{text}b"])[0].tolist() == [*reference.encode("a"), number, *reference.encode("b")]


def test_a_folder_is_written_as_it_was_given(
    tmp_path: Path, proto: bytes, reference: sentencepiece.SentencePieceProcessor
) -> None:
    folder = folder_of(
        tmp_path / "published",
        proto,
        {"extra_ids": 100, "legacy": False, "name_or_path": "somebody/model"},
        added_tokens={"<n>": reference.get_piece_size() + 100},
        special_tokens_map={"eos_token": "</s>", "mask_token": "<mask>"},
    )
    tokenizer = Tokenizer.load(folder)
    tokenizer.save(tmp_path / "run")
    contents = [{path.name: path.read_bytes() for path in files.iterdir()} for files in (folder, tmp_path / "run")]
    assert contents[0] == contents[1]
    again = Tokenizer.load(tmp_path / "run")
    sample = list(texts(50, 3, ("<n>", "<extra_id_3>", "<mask>"), long_letters=100))
    assert again.fingerprint == tokenizer.fingerprint
    for ids, same in zip(tokenizer.encode_prompts(sample), again.encode_prompts(sample), strict=True):
        assert ids.tolist() == same.tolist()


def test_of_a_bare_model_the_file_is_found_and_transformers_gets_what_it_needs(tmp_path: Path, proto: bytes) -> None:
    (tmp_path / "a.model").write_bytes(proto)
    tokenizer = Tokenizer.load(tmp_path / "a.model")
    tokenizer.save(tmp_path / "run")
    again = Tokenizer.load(tmp_path / "run")
    assert (tmp_path / "run/spiece.model").read_bytes() == proto
    assert again.sentinel_ids == tokenizer.sentinel_ids
    assert again.fingerprint == tokenizer.fingerprint == Tokenizer.load(tmp_path).fingerprint


def test_without_legacy_no_blank_follows_an_added_token(
    tmp_path: Path, proto: bytes, reference: sentencepiece.SentencePieceProcessor
) -> None:
    pieces = map(reference.id_to_piece, range(len(reference)))
    letter = next(piece for piece in pieces if len(piece) == 1 and piece.isalpha())
    for legacy in (True, False):
        tokenizer = Tokenizer.load(folder_of(tmp_path / str(legacy), proto, {"legacy": legacy}))
        ids = tokenizer.encode_prompts([f"<extra_id_0>{letter}"])[0].tolist()
        follows = reference.encode(letter) if legacy else [reference.piece_to_id(letter)]
        assert ids == [tokenizer.sentinel_ids[0], *follows]


def test_sentinels_may_be_pieces_as_in_mt5(tmp_path: Path) -> None:
    symbols = ["▁<extra_id_1>", "▁<extra_id_0>"]
    proto = sentencepiece_model(["a word and another"] * 20, 60, user_defined_symbols=symbols)
    (tmp_path / "spiece.model").write_bytes(proto)
    pieces = sentencepiece.SentencePieceProcessor(model_proto=proto)
    ours = Tokenizer.load(tmp_path)
    assert list(ours.sentinel_ids) == [pieces.piece_to_id(symbol) for symbol in reversed(symbols)]
    assert ours.encode_prompts(["a <extra_id_0> word"])[0].tolist() == pieces.encode("a <extra_id_0> word")
    assert not set(ours.sentinel_ids) & set(ours.encode_batch(["a <extra_id_0> word"])[0].tolist())


def test_texts_are_encoded_and_decoded_as_by_sentencepiece(
    tmp_path: Path, proto: bytes, reference: sentencepiece.SentencePieceProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer.load(folder_of(tmp_path / "model", proto, {}))
    for text in texts(100, 5, long_letters=500):
        ids = reference.encode(text)
        assert tokenizer.decode(ids) == reference.decode(ids)
        assert "".join(as_they_come(tokenizer, iter(ids))) == tokenizer.decode_answer(ids)
    prompt = tokenizer.encode_prompts(["a <extra_id_1> b"])[0].tolist()
    assert tokenizer.decode_answer([0, *prompt, 1]) == "a<extra_id_1> b" and tokenizer.decode(prompt) == "a b"
    long = "".join(texts(1000, 4, long_letters=3000))
    monkeypatch.setattr("data.tokenizers.tokenizer.ENCODE_CHARS", 8192)
    assert tokenizer.encode_batch(["a", long, "b"])[1].tolist() == reference.encode(long), "a long text is one text"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_the_library_that_defines_them(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("transformers")
    assert not differing(kind, tmp_path / "tokenizer", 3000, long_letters=20_000)


def test_labels_of_words_go_to_the_first_token_that_transformers_counts(tmp_path: Path) -> None:
    """By its `word_ids`, each piece that begins with a blank begins a word, also a blank alone before a rare letter."""
    sentences = ["The fox runs far", "a b c d e f g h i j k l m n o p q r s t u v w x y z 0 1 2 3 \u00e9"] * 40
    proto = sentencepiece_model(sentences, 60, character_coverage=1.0)
    encoder = TextEncoder(Tokenizer.load(folder_of(tmp_path / "model", proto, {"extra_ids": 0})))
    for text, silent in {
        "fox \u00e9 2": [],
        "3": [],
        "\u2d63 a 2": [],
        "fox \u200b runs": [1],
        "fox \u200b \u00e9": [1],
        "runs \u200b": [1],
    }.items():
        ids, first_tokens = encoder.with_places(text, len(text.split()))
        tokens = [encoder.tokenizer.id_to_token(int(number)) or "" for number in ids]
        assert np.flatnonzero(first_tokens < 0).tolist() == silent
        begins = [number for number, token in enumerate(tokens) if token.startswith("▁")]
        assert first_tokens[first_tokens >= 0].tolist() == begins, tokens
    ids, first_tokens = encoder.with_places("3\u00e9", 2)  # These are letters, not words.
    assert first_tokens.tolist() == [1, 2]
