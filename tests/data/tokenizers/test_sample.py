"""Samples are even, and words are counted in bounded memory, whatever the texts are like."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from data.tokenizers.sample import (
    LONGEST_SAMPLE_CHARS,
    TrainingLimits,
    count_words,
    most_frequent,
    sample_texts,
)
from data.tokenizers.training import train_tokenizer
from settings.declared import ROOT

HAN = [chr(code) for code in range(0x4E00, 0x4E00 + 2000)]


def verse(lines: int, seed: int = 0) -> list[str]:
    """Lines of seven letters, nearly all different: as words, each would be one of its own."""
    draw = random.Random(seed)
    return ["".join(draw.choices(HAN, k=7)) for _ in range(lines)]


def test_the_sample_keeps_to_its_bytes_and_its_order() -> None:
    texts = [f"{number:05d} é" for number in range(5000)]  # 8 bytes each
    sample = list(sample_texts(iter(texts), 8000))
    assert 990 <= len(sample) <= 1000 and sample == sorted(sample)
    assert list(sample_texts(texts, 10**6)) == texts
    assert [len(text) for text in sample_texts(["x" * 10**6], 1000)] == [LONGEST_SAMPLE_CHARS], "one huge row"


def test_a_sample_on_the_disk_is_the_same_and_leaves_nothing_behind(tmp_path: Path) -> None:
    texts = [f"{number} " * 3000 for number in range(2000)]
    sample = list(sample_texts(texts, 10 * 2**20, folder=tmp_path))
    assert 0.9 < sum(map(len, sample)) / (10 * 2**20) <= 1
    assert set(sample) <= set(texts) and not list(tmp_path.iterdir())


def test_frequent_words_survive_a_table_that_is_full() -> None:
    draw = random.Random(1)
    texts = [f"river {draw.randrange(10**9)} boat {draw.randrange(10**9)} river" for _ in range(3000)]
    counts = count_words(texts, str.split, 500)
    assert counts["river"] == 6000 and counts["boat"] == 3000 and len(counts) <= 503


def test_what_occurs_often_inside_rare_runs_still_counts() -> None:
    texts = [f"{line[:3]}春天{line[3:]}" for line in verse(4000)]
    counts = count_words(texts, lambda text: [text], 1000)
    words = dict(most_frequent(counts, 3000, lambda word: len(word.encode())))
    assert sum(len(word.encode()) for word in words) <= 3000 and words
    assert any("春" in word or "天" in word for word in words)


@pytest.mark.parametrize("kind", ["bpe", "unigram", "words"])
def test_any_text_trains_within_the_room(kind: str) -> None:
    """Lines of seven letters, one long line of letters at random, and digits: nothing but different words."""
    draw = random.Random(2)
    texts = [
        *verse(3000),
        "".join(draw.choices("abcdefgh", k=50_000)),
        *(str(draw.randrange(10**12)) for _ in range(3000)),
    ]
    tokenizer = train_tokenizer(texts, kind, 700, 2**20, limits=TrainingLimits(2000, 6000, 3000))
    assert 100 < tokenizer.size <= 700


PEAK = """
from data.tokenizers.sample import TrainingLimits
from data.tokenizers.training import train_tokenizer
from tests.data.tokenizers.test_sample import verse
def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
texts = verse(40_000)
before = peak()
train_tokenizer(texts, "bpe", 4000, 2**23, limits=TrainingLimits(20_000, 60_000, 30_000))
print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="needs /proc to measure memory")
def test_verse_takes_no_more_memory_than_prose() -> None:
    """40,000 different lines took 110 MiB when each was a word to learn from."""
    child = subprocess.run([sys.executable, "-c", PEAK], cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(child.stdout) < 50 * 1024, f"{int(child.stdout) / 1024:.0f} MiB"
