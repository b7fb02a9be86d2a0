"""Tokenizers that are trained here: T5's ids, texts that come back, and the same memory for any corpus."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data.prepare.encode import TextEncoder
from data.tokenizers.pieces import pieces
from data.tokenizers.tokenizer import ENCODE_CHARS, Tokenizer
from data.tokenizers.training import train_tokenizer
from settings.declared import ROOT
from settings.errors import UserError

LINES = [
    "the river runs under a stone bridge, and two words <pad> of </s> a strike <unk> b",
    "    return a + b\n\tif x:\n",
    "春天的河水从石桥下流过",
    "AA1 B  K",
    "0x41",
]
SPELLING = ["bpe", "byte", "unigram"]  # Kinds in which no text has unknown tokens.
TEXTS = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60) | st.text(
    alphabet=" \t\nab春<>/s0x41", max_size=40
)


def corpus() -> list[str]:
    draw = random.Random(0)
    words = [
        "time",
        "year",
        "people",
        "way",
        "day",
        "man",
        "thing",
        "woman",
        "life",
        "child",
        "world",
        "school",
        "state",
        "family",
        "student",
        "group",
    ]
    letters = "模型训练数据学习时间世界生活工作问题系统方法结果研究发展中国人民社会经济文化"
    english = [" ".join(word + draw.choice(["", ",", "s"]) for word in draw.choices(words, k=12)) for _ in range(400)]
    return english + ["".join(draw.choices(letters, k=20)) + "。" for _ in range(100)]


@pytest.fixture(scope="module")
def own() -> Mapping[str, Tokenizer]:
    return {kind: train_tokenizer(LINES * 30, kind, 900, 2**20) for kind in (*SPELLING, "words")}


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_ids_follow_t5(kind: str) -> None:
    trained = train_tokenizer(corpus(), kind, 700, 2**20)
    assert (trained.pad_id, trained.eos_id, trained.unk_id) == (0, 1, 2)
    assert trained.size == 700 and trained.num_sentinels == 100
    assert list(trained.sentinel_ids) == list(range(699, 599, -1))


def test_training_is_deterministic() -> None:
    first, second = (train_tokenizer(corpus(), "bpe", 450, 2**20) for _ in range(2))
    assert first.fingerprint == second.fingerprint


@pytest.mark.parametrize("kind", SPELLING)
@settings(derandomize=True, max_examples=60, deadline=None)
@given(text=TEXTS)
@example(text="    return a + b")
@example(text=" ")
@example(text="</s> <unk> <pad> <extra_id_0> <extra_id_99> <0x41>")
@example(text="e\u0301\u00a0ﾊﾞ\ufeff\u2028\x00\r\n")
def test_any_text_comes_back(own: Mapping[str, Tokenizer], kind: str, text: str) -> None:
    tokenizer = own[kind]
    expected = text.replace("▁", " ") if kind == "unigram" else text  # A Unigram piece writes a blank so.
    (document,), (answer,) = tokenizer.encode_batch([text]), tokenizer.encode_prompts([text])
    assert tokenizer.decode(document) == tokenizer.decode_answer(answer) == expected
    assert "".join(pieces(tokenizer, iter(answer.tolist()))) == expected
    assert tokenizer.unk_id not in document and tokenizer.eos_id not in [*document, *answer]


@pytest.mark.parametrize("kind", SPELLING)
def test_a_text_longer_than_a_part_is_as_if_encoded_whole(
    own: Mapping[str, Tokenizer], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = own[kind]
    long = "".join(LINES[number * 7 % 5][number % 4 :] for number in range(1000)) + "河水从石桥下" * 1000
    (whole,) = tokenizer.encode_batch([long])
    monkeypatch.setattr("data.tokenizers.tokenizer.ENCODE_CHARS", 9000)
    one, parts, another = tokenizer.encode_batch(["a", long, "b"])
    assert tokenizer.decode(parts) == long and tokenizer.decode([*one, *another]) == "ab"
    assert parts.tolist() == whole.tolist()


def test_a_text_of_one_part_more_is_encoded_whole(own: Mapping[str, Tokenizer]) -> None:
    assert [len(ids) for ids in own["byte"].encode_batch(["a", "b" * (ENCODE_CHARS + 9), "c"])] == [
        1,
        ENCODE_CHARS + 9,
        1,
    ]


@pytest.mark.parametrize("kind", [*SPELLING, "words"])
def test_the_beginning_of_a_long_text_is_that_of_the_whole(own: Mapping[str, Tokenizer], kind: str) -> None:
    encoder = TextEncoder(own[kind])
    for text in ("strike of 你好 " * 2000, "lettersofwords" * 2000, "a" * 30_000, "\u200b" * 9_000 + "words", "a", ""):
        whole = encoder.encode([text])[0].tolist()
        for most in (1, 500, 20_000):
            assert encoder.beginning(text, most).tolist() == whole[:most]


@pytest.mark.parametrize("kind", [*SPELLING, "words"])
def test_a_prompt_asks_by_sentinels_alone(own: Mapping[str, Tokenizer], kind: str) -> None:
    """All else is encoded as it is in training."""
    tokenizer = own[kind]
    html, both, filled = "a </s>strike</s> of <pad>", "a</s>b <extra_id_0> <unk>", "a b <extra_id_0> b"
    of_html, ids, of_filled = (ids.tolist() for ids in tokenizer.encode_prompts([html, both, filled]))
    assert of_html == tokenizer.encode_batch([html])[0].tolist()
    assert of_filled == tokenizer.encode_batch([filled], special=True)[0].tolist()
    in_chat = tokenizer.encode_prompts([both], is_chat=True)[0].tolist()
    assert in_chat == tokenizer.encode_batch([both], special=True)[0].tolist()
    assert ids.count(tokenizer.sentinel_ids[0]) == 1 and not {tokenizer.eos_id, tokenizer.pad_id} & set(ids)


def test_words_are_tokens_whole_and_unknown_ones_are_shown_where_they_stand_for_something() -> None:
    tokenizer = train_tokenizer(["kor: ᄀ ᅡ", "k a̠ ɡ", "t͡ɕ͈ a̠"], "words", 200, 2**20)
    whole, unknown = tokenizer.encode_batch(["t͡ɕ͈ a̠ ɡ", "t͡ɕ͈ new ɡ"])
    assert len(whole) == len(unknown) == 3 and tokenizer.unk_id in unknown and tokenizer.unk_id not in whole
    assert tokenizer.decode(whole) == "t͡ɕ͈ a̠ ɡ" and tokenizer.size == 3 + 7 + 100 == 10 + tokenizer.num_sentinels
    ids = [*unknown.tolist(), tokenizer.sentinel_ids[0], tokenizer.eos_id, tokenizer.pad_id]
    assert tokenizer.decode_with_unknown(ids) == "t͡ɕ͈ <unk> ɡ <extra_id_0>"
    assert tokenizer.decode_answer(ids) == "t͡ɕ͈ ɡ <extra_id_0>" and tokenizer.decode(ids) == "t͡ɕ͈ ɡ"


@pytest.mark.parametrize("kind", ["bpe", "unigram", "words"])
def test_without_unknown_tokens_the_text_is_the_same(own: Mapping[str, Tokenizer], kind: str) -> None:
    tokenizer = own[kind]
    text = tokenizer.encode_batch([" two words  of 春天的河水从石桥下流过 "])[0].tolist()
    ids = [tokenizer.pad_id, *text, tokenizer.sentinel_ids[1], *text, tokenizer.eos_id, tokenizer.size + 5]
    ids += [] if kind == "words" else [tokenizer.unk_id]  # No text has it where bytes spell what is no piece.
    assert tokenizer.decode_with_unknown(ids) == tokenizer.decode_answer(ids)


def test_more_letters_than_pieces_is_no_problem_for_unigram() -> None:
    texts = ["".join(chr(0x4E00 + 37 * row + column) for column in range(30)) for row in range(60)]
    tokenizer = train_tokenizer(texts, "unigram", 640, 2**20)
    assert tokenizer.size <= 640 and tokenizer.decode(tokenizer.encode_batch(texts[:1])[0]) == texts[0]


def test_a_small_vocabulary_and_no_text_are_refused() -> None:
    with pytest.raises(UserError, match=r"--vocab_size = 359, .*360 or more"):
        train_tokenizer(corpus(), "bpe", 359, 2**20)
    with pytest.raises(UserError, match="--train_file"):
        train_tokenizer([], "bpe", 500, 2**20)


PEAK_OF_TRAINING = """
import random, sys
from data.tokenizers.training import train_tokenizer
draw = random.Random(0)
def texts(megabytes):
    size = 0
    while size < megabytes * 10**6:
        text = " ".join(str(draw.randrange(3000)) for _ in range(60))
        text += "".join(chr(draw.randrange(0x4E00, 0x5000)) for _ in range(20))
        size += len(text.encode())
        yield text
train_tokenizer(texts(int(sys.argv[1])), "bpe", 2000, 2**20)
with open("/proc/self/status") as status:
    print(next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="needs /proc to measure memory")
def test_training_takes_the_same_memory_for_any_corpus() -> None:
    peaks = []
    for megabytes in (4, 40):
        command = [sys.executable, "-c", PEAK_OF_TRAINING, str(megabytes)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        peaks.append(float(done.stdout))
    assert peaks[1] < peaks[0] + 15, f"{peaks} MiB"
