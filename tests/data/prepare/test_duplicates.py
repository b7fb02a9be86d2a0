"""Rows that repeat an earlier one: the first stays, whatever the order, and memory does not grow with the corpus."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.prepare import duplicates
from data.prepare.duplicates import find_duplicates
from data.prepare.preparing import prepare
from data.shards.store import Manifest
from data.sources.files import find
from data.text.conversations import Examples
from support.storage import Parts
from tests.data.sources.rows import write_rows


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
    ):
        source = find(str(write_rows(tmp_path / "a.jsonl", [{"text": text} for text in rows])))
        for _ in range(2):  # The second time, all digests are on the disk.
            parts = Parts(tmp_path / "work", "of this work", ".bin")
            is_double = find_duplicates(source, ["text"], Examples(), parts, 0, max_rows=max_rows)
            assert np.flatnonzero(is_double).tolist() == expected
        parts.remove()


def write(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf8")
    return path


def test_preparing_leaves_duplicates_out_and_reports_them(configure: Any, tmp_path: Path) -> None:
    texts = [f"text {number} " * 20 for number in range(30)]
    path = write(tmp_path / "a.jsonl", [*texts, *texts[:10]])
    prepared = prepare(configure(train_file=path, dedup="exact"))
    assert prepared.counts["train_duplicate_rows"] == 10
    assert prepared.counts["train_texts"] + prepared.counts["validation_texts"] == 30
    report = Manifest.of(prepared.train_dir).content["dropped"]["duplicate"]
    assert report["count"] == 10 and report["samples"][0] == texts[0][:160]
