from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.tokenizers.tokenizer import Tokenizer
from data.tokenizers.training import byte_tokenizer
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


def test_folders_that_hold_no_tokenizer_are_user_errors(tmp_path: Path) -> None:
    for path, content, problem in (
        (tmp_path / "missing", None, "missing, no such folder"),
        (tmp_path / "spiece.model", b"", r"spiece\.model: is no SentencePiece model"),
        (tmp_path / "tokenizer.json", b'{"version": 1}', "is not a tokenizer"),
    ):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(UserError, match=problem):
            Tokenizer.load(path if content is None else tmp_path)


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
