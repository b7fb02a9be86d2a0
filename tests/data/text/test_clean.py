"""Cleaning: the clean form of texts, and which rows are dropped and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from data.prepare.preparing import prepare
from data.shards.store import Manifest
from data.text.clean import fault, normalise


@pytest.mark.parametrize(
    "text, clean",
    [
        ("  one\t two  ", "one two"),
        ("e\u0301te\u0301", "été"),
        ("a\r\nb\rc\u2028d", "a\nb\nc\nd"),
        ("zero\u200bwidth\ufeff\x00\x07", "zerowidth"),
        ("क्\u200dष", "क्\u200dष"),  # the joiner belongs to the script
    ],
)
def test_texts_are_normalised(text: str, clean: str) -> None:
    assert normalise(text) == clean


PROSE = {
    "english": "The library reads a row at a time, and what it has read it lets go. So any file fits.",
    "chinese": "这个程序一次只读一行，读完就放下，所以多大的文件都可以处理。预算是一份合同。",
    "hindi": "यह कार्यक्रम एक बार में एक पंक्ति पढ़ता है, और फिर उसे छोड़ देता है।",
}


@pytest.mark.parametrize("text", PROSE.values(), ids=PROSE)
def test_good_text_of_any_language_stays(text: str) -> None:
    assert fault((text,)) is None


def test_preparing_cleans_on_request_and_reports(configure: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    texts = [f"{PROSE['english']} {number}" for number in range(40)] + ["x", "##########", "go go " * 90, "  "]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    plain = prepare(configure(train_file=path))
    cleaned = prepare(configure(train_file=path, clean=True))
    assert plain.train_dir != cleaned.train_dir
    assert cleaned.counts["train_dropped_rows"] == 3 and cleaned.counts["train_empty_rows"] == 1
    assert cleaned.counts["train_texts"] + cleaned.counts["validation_texts"] == 40
    report = Manifest.of(cleaned.train_dir).content["dropped"]
    assert {reason: entry["count"] for reason, entry in report.items()} == {
        "too short": 1,
        "few letters": 1,
        "repetitive": 1,
    }
    assert report["too short"]["samples"] == ["x"]
    assert plain.counts["train_dropped_rows"] == 0
