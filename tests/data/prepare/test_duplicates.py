"""Rows that repeat an earlier one: the first stays, whatever the order, and memory does not grow with the corpus."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.storage import Parts
from data.prepare import duplicates
from data.prepare.duplicates import find_duplicates
from data.prepare.preparing import prepare
from data.shards.store import Manifest
from data.sources.files import find
from data.text.conversations import Examples
from settings.declared import ROOT


def write(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf8")
    return path


def test_repeats_are_found_and_the_first_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one text is most of the rows, and its copies are in many buckets' worth of rows."""
    monkeypatch.setattr(duplicates, "BUCKET_ROWS", 7)
    monkeypatch.setattr(duplicates, "PART_ROWS", 1)
    draw = random.Random(0)
    texts = ["[deleted]" if draw.random() < 0.3 else f"text {draw.randrange(150)}" for _ in range(400)]
    repeated = [number for number, text in enumerate(texts) if text in texts[:number]]
    for rows, max_rows, expected in (
        (texts, None, repeated),
        (texts, 50, [number for number in repeated if number < 50]),
        (["", " "], None, []),
    ):
        source = find(str(write(tmp_path / "a.jsonl", rows)))
        for _ in range(2):  # The second time, all digests are on the disk.
            parts = Parts(tmp_path / "work", "of this work", ".bin")
            is_double = find_duplicates(source, ["text"], Examples(), parts, 0, max_rows=max_rows)
            assert np.flatnonzero(is_double).tolist() == expected
        parts.remove()


def test_preparing_leaves_duplicates_out_and_reports_them(configure: Any, tmp_path: Path) -> None:
    texts = [f"text {number} " * 20 for number in range(30)]
    path = write(tmp_path / "a.jsonl", [*texts, *texts[:10]])
    prepared = prepare(configure(train_file=path, dedup="exact"))
    assert prepared.counts["train_duplicate_rows"] == 10
    assert prepared.counts["train_texts"] + prepared.counts["validation_texts"] == 30
    report = Manifest.of(prepared.train_dir).content["dropped"]["duplicate"]
    assert report["count"] == 10 and report["samples"][0] == texts[0][:160]


MEMORY = """
import resource, sys
from pathlib import Path
import numpy as np
from data.prepare.duplicates import repeats
folder, rows = Path(sys.argv[1]), int(sys.argv[2])
draw = np.random.default_rng(0)
paths = [folder / str(number) for number in range(rows // 10**5)]
for path in paths:
    numbers = draw.integers(0, rows // 2, 10**5).astype(np.uint64)
    (numbers * np.uint64(0x9E3779B97F4A7C15)).tofile(path)
print(int(repeats(paths).sum()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="needs /proc to measure memory")
def test_ten_million_rows_fit_in_a_gigabyte(tmp_path: Path) -> None:
    command = [sys.executable, "-c", MEMORY, str(tmp_path), str(10**7)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    doubles, peak = done.stdout.split()
    assert 5_000_000 < int(doubles) < 6_000_000
    assert float(peak) < 1000, f"{peak} MiB"
