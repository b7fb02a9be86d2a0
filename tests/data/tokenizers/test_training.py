from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from data.tokenizers.tokenizer import Tokenizer
from data.tokenizers.training import train_tokenizer
from settings.declared import ROOT
from settings.errors import UserError

WORDS = [
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
CHINESE = "模型训练数据学习时间世界生活工作问题系统方法结果研究发展中国人民社会经济文化"


def corpus(rows: int = 400) -> list[str]:
    draw = random.Random(0)
    english = [" ".join(word + draw.choice(["", ",", "s"]) for word in draw.choices(WORDS, k=12)) for _ in range(rows)]
    return english + ["".join(draw.choices(CHINESE, k=20)) + "。" for _ in range(rows // 4)]


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def trained(request: pytest.FixtureRequest) -> Tokenizer:
    return train_tokenizer(corpus(), request.param, 700, 2**20)


def test_ids_follow_t5(trained: Tokenizer) -> None:
    assert (trained.pad_id, trained.eos_id, trained.unk_id) == (0, 1, 2)
    assert trained.size == 700 and trained.num_sentinels == 100
    assert list(trained.sentinel_ids) == list(range(699, 599, -1))


def test_words_are_tokens_whole_and_unknown_ones_are_told() -> None:
    trained = train_tokenizer(["kor: ᄀ ᅡ", "k a̠ ɡ", "t͡ɕ͈ a̠"], "words", 200, 2**20)
    ids = trained.encode_batch(["t͡ɕ͈ a̠ ɡ", "t͡ɕ͈ new ɡ"])
    assert [len(row) for row in ids] == [3, 3] and trained.unk_id in ids[1] and trained.unk_id not in ids[0]
    assert trained.decode(ids[0]) == "t͡ɕ͈ a̠ ɡ"
    assert trained.num_sentinels == 100 and trained.size == 3 + 7 + 100


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
        text = " ".join(str(draw.randrange(3000)) for _ in range(60)) + "".join(chr(draw.randrange(0x4E00, 0x5000)) for _ in range(20))
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


def test_training_is_deterministic() -> None:
    assert (
        train_tokenizer(corpus(), "bpe", 450, 2**20).fingerprint
        == train_tokenizer(corpus(), "bpe", 450, 2**20).fingerprint
    )
