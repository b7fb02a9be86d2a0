"""Our own tokenizers give texts back, whole and as their tokens come."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data.tokenizers.pieces import pieces
from data.tokenizers.tokenizer import Tokenizer
from data.tokenizers.training import train_tokenizer

LINES = [
    "the river runs under a stone bridge",
    "    return a + b\n\tif x:\n",
    "春天的河水从石桥下流过",
    "AA1 B  K",
    "0x41 </s> <pad>",
]
TEXTS = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60) | st.text(
    alphabet=" \t\nab春<>/s0x41", max_size=40
)


@pytest.fixture(scope="module")
def own() -> Mapping[str, Tokenizer]:
    return {kind: train_tokenizer(LINES * 30, kind, 900, 2**20) for kind in ("bpe", "byte", "unigram", "words")}


@pytest.mark.parametrize("kind", ["bpe", "byte", "unigram"])
@settings(derandomize=True, max_examples=60, deadline=None)
@given(text=TEXTS)
@example(text="    return a + b")
@example(text=" ")
@example(text="</s> <unk> <pad> <extra_id_0> <extra_id_99> <0x41>")
@example(text="e\u0301\u00a0ﾊﾞ\ufeff\u2028\x00\r\n")
def test_any_text_comes_back(own: Mapping[str, Tokenizer], kind: str, text: str) -> None:
    tokenizer = own[kind]
    wanted = text.replace("▁", " ") if kind == "unigram" else text  # what a Unigram piece writes for a blank
    (document,), (answer,) = tokenizer.encode_batch([text]), tokenizer.encode_prompts([text])
    assert tokenizer.decode(document) == tokenizer.decode_answer(answer) == wanted
    assert "".join(pieces(tokenizer, iter(answer.tolist()))) == wanted
    assert tokenizer.unk_id not in document and tokenizer.eos_id not in [*document, *answer]


@pytest.mark.parametrize("kind", ["bpe", "byte", "unigram"])
def test_a_text_longer_than_a_part_is_as_if_encoded_whole(
    own: Mapping[str, Tokenizer], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = own[kind]
    long = "".join(LINES[number * 7 % 5][number % 4 :] for number in range(4000)) + "河水从石桥下" * 4000
    (whole,) = tokenizer.encode_batch([long])
    monkeypatch.setattr("data.tokenizers.tokenizer.ENCODE_CHARS", 9000)
    (parts,) = tokenizer.encode_batch([long])
    assert tokenizer.decode(parts) == long
    assert parts.tolist() == whole.tolist()
