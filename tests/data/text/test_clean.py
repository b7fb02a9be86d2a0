"""Cleaning: the clean form of texts, and which rows are dropped and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.prepare.preparing import prepare
from data.shards.store import Manifest
from data.text.clean import fault, letter_share, normalise, repetition


@pytest.mark.parametrize(
    "text, clean",
    [
        ("  one\t two  ", "one two"),
        ("e\u0301te\u0301", "été"),
        ("a\r\nb\rc\u2028d", "a\nb\nc\nd"),
        ("a \n\n\n\n b", "a\n\nb"),
        ("zero\u200bwidth\ufeff\x00\x07", "zerowidth"),
        ("你\u3000好", "你 好"),
        ("क्\u200dष", "क्\u200dष"),  # the joiner belongs to the script
    ],
)
def test_texts_are_normalised(text: str, clean: str) -> None:
    assert normalise(text) == clean


@settings(max_examples=40)
@given(st.text(max_size=200))
def test_a_clean_text_stays_as_it_is(text: str) -> None:
    assert normalise(normalise(text)) == normalise(text)


PROSE = {
    "english": "The library reads a row at a time, and what it has read it lets go. So any file fits.",
    "chinese": "这个程序一次只读一行，读完就放下，所以多大的文件都可以处理。预算是一份合同。",
    "arabic": "يقرأ البرنامج صفا واحدا في كل مرة، ثم يتركه، ولذلك يتسع لأي ملف مهما كان حجمه.",
    "code": "def area(width: int, height: int) -> int:\n    return width * height  # in pixels",
}


@pytest.mark.parametrize("text", PROSE.values(), ids=PROSE)
def test_good_text_of_any_language_stays(text: str) -> None:
    assert fault((text,)) is None


@pytest.mark.parametrize(
    "row, reason",
    [
        (("hi",), "too short"),
        (("----- ***** ===== +++++",), "few letters"),
        (("哈" * 200,), "repetitive"),
        (("a fine question", "no " * 200), "repetitive"),
    ],
)
def test_bad_rows_are_dropped_with_the_reason(row: tuple[str, ...], reason: str) -> None:
    assert fault(row) == reason


def test_shares_of_what_holds_little() -> None:
    assert letter_share(" a1. ") == 2 / 3 and letter_share(" ") == 1.0 and repetition("") == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "\u0939\u093f\u0928\u094d\u0926\u0940",
        "\u0e17\u0e35\u0e48\u0e19\u0e35\u0e48",
        "\u0f62\u0f92\u0fb1\u0f63",
        "a\u0302\u0323",
    ],
    ids=["Hindi", "Thai", "Tibetan", "two marks on a letter"],
)
def test_marks_are_part_of_letters(text: str) -> None:
    assert letter_share(text) == 1.0 and letter_share(f"{text}{'.' * len(text)}") == 0.5


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
