"""Samples are even, and words are counted in bounded memory, whatever the texts are like."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from data.tokenizers.sample import LONGEST_SAMPLE_CHARS, sample_texts
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
