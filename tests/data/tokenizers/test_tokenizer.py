from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.text.templates import Template
from data.tokenizers.tokenizer import Tokenizer
from data.tokenizers.training import byte_tokenizer, train_tokenizer
from settings.errors import UserError

TEXTS = ["Hello, world!  Two  spaces\n\tnew line", "你好,世界 🙂 é", "", "x"]
BYTES = byte_tokenizer()


@given(st.text(max_size=200).filter(lambda text: text.isprintable() or text.isascii()))
def test_bytes_are_byt5s_ids_and_come_back(text: str) -> None:
    ids = BYTES.encode_batch([text])[0]
    assert ids.dtype == np.int32 and ids.tolist() == [byte + 3 for byte in text.encode("utf8")]
    assert BYTES.decode(ids) == text


def test_saved_and_loaded_it_is_the_same(tmp_path: Path) -> None:
    (tmp_path / "spiece.model").write_bytes(b"of another")
    BYTES.save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert not (tmp_path / "spiece.model").exists()
    assert loaded.fingerprint == BYTES.fingerprint and loaded.size == BYTES.size
    for ids, again in zip(BYTES.encode_batch(TEXTS), loaded.encode_batch(TEXTS), strict=True):
        assert ids.tolist() == again.tolist()
    loaded.encode_batch(["x"])  # It leaves the library in another mode, which must not reach the file.
    loaded.save(tmp_path / "again")
    assert (tmp_path / "again/tokenizer.json").read_bytes() == (tmp_path / "tokenizer.json").read_bytes()
    config = json.loads((tmp_path / "again/tokenizer_config.json").read_text())
    assert config["model_input_names"] == ["input_ids", "attention_mask"], (
        "T5 takes no others; transformers 4 gave more"
    )


def test_other_names_of_special_tokens_are_taken_from_the_folder(tmp_path: Path) -> None:
    BYTES.save(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        text = (tmp_path / name).read_text(encoding="utf8")
        (tmp_path / name).write_text(text.replace("</s>", "[EOS]"), encoding="utf8")
    assert Tokenizer.load(tmp_path).eos_id == 1
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "special_tokens_map.json").unlink()
    with pytest.raises(UserError, match=r"has no </s> \(eos_token\)"):
        Tokenizer.load(tmp_path)


def test_folders_that_hold_no_tokenizer_are_user_errors(tmp_path: Path) -> None:
    for path, content, problem in (
        (tmp_path / "missing", None, "missing, no such folder"),
        (tmp_path, None, r"holds no tokenizer\.json"),
        (tmp_path / "spiece.model", b"", r"spiece\.model: is no SentencePiece model"),
        (tmp_path / "spiece.model", b"x", r"spiece\.model: is no SentencePiece model"),
        (tmp_path / "tokenizer.json", b'{"version": 1}', "is not a tokenizer"),
    ):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(UserError, match=problem):
            Tokenizer.load(path if content is None else tmp_path)


def test_names_in_added_tokens_alone_keep_the_flags_of_tokenizer_json(tmp_path: Path) -> None:
    """As transformers before 4.34 wrote folders."""
    BYTES.save(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    flags = {"single_word": True, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    content["added_tokens"].append({"id": 384, "content": "word", **flags})
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "added_tokens.json").write_text('{"word": 384}')
    ids, inside = (ids.tolist() for ids in Tokenizer.load(tmp_path).encode_prompts(["a word", "aword"]))
    assert ids[-1] == 384 and 384 not in inside


def test_a_chat_template_that_was_not_used_is_not_kept(tmp_path: Path) -> None:
    BYTES.save(tmp_path / "published")
    (tmp_path / "published/chat_template.jinja").write_text("{{ messages[-1]['content'] }}!")
    tokenizer = Tokenizer.load(tmp_path / "published")
    tokenizer.template = Template.load("{{ messages[-1]['content'] }}!")
    tokenizer.save(tmp_path / "same")
    tokenizer.template = Template()
    tokenizer.save(tmp_path / "plain")
    assert [(tmp_path / name / "chat_template.jinja").exists() for name in ("same", "plain")] == [True, False]
    assert "chat_template" not in (tmp_path / "plain/tokenizer_config.json").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "with_model_config"), [("bpe", True), ("unigram", False), ("byte", True)])
def test_transformers_loads_the_folder(tmp_path: Path, kind: str, with_model_config: bool) -> None:
    transformers = pytest.importorskip("transformers")
    corpus = (f"the {number}th text of a small corpus, with some words" for number in range(500))
    ours = train_tokenizer(corpus, kind, 700, 2**20)
    ours.save(tmp_path)
    if with_model_config:
        transformers.T5Config(vocab_size=ours.size).save_pretrained(tmp_path)
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (reference.pad_token_id, reference.eos_token_id, reference.unk_token_id) == (0, 1, 2)
    assert reference.convert_tokens_to_ids("<extra_id_0>") == ours.sentinel_ids[0]
    batch = reference(TEXTS, padding=True)
    for text, ids, mask in zip(TEXTS, batch["input_ids"], batch["attention_mask"], strict=True):
        real = [number for number, is_real in zip(ids, mask, strict=True) if is_real]
        assert real == [*ours.encode_batch([text])[0].tolist(), ours.eos_id]
        assert set(ids[len(real) :]) <= {0}
        assert reference.decode(ids, skip_special_tokens=True) == text
    assert (
        reference("a <extra_id_0> b")["input_ids"][:-1]
        == ours.encode_batch(["a <extra_id_0> b"], special=True)[0].tolist()
    )


@pytest.mark.slow
def test_byte_ids_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    reference = transformers.ByT5Tokenizer()
    for text in TEXTS:
        assert reference(text)["input_ids"][:-1] == BYTES.encode_batch([text])[0].tolist()
    sentinels = reference.convert_tokens_to_ids([f"<extra_id_{number}>" for number in range(125)])
    assert sentinels == list(BYTES.sentinel_ids)


@pytest.mark.slow
def test_a_t5_folder_of_transformers_is_read(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pieces = [(name, 0.0) for name in ("<pad>", "</s>", "<unk>")]
    pieces += [("▁", -2.0), ("▁hello", -3.0), ("▁world", -4.0), ("a", -5.0)]
    pieces += [(f"<extra_id_{number}>", 0.0) for number in reversed(range(100))]
    transformers.T5Tokenizer(vocab=pieces).save_pretrained(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.unk_id, tokenizer.num_sentinels) == (0, 1, 2, 100)
    assert tokenizer.sentinel_ids[0] == tokenizer.size - 1 == 106 and tokenizer.sentinel_ids[99] == 7
    assert tokenizer.decode(tokenizer.encode_batch(["hello world"])[0]) == "hello world"
    literal = tokenizer.encode_batch(["a</s>a<extra_id_0>", "<pad>"])
    assert not {0, 1, 106} & {*literal[0].tolist(), *literal[1].tolist()}
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["eos_token"] == "</s>"
