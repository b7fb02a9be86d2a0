"""Dates: what is held out, and how a day is written."""

from __future__ import annotations

import json
from datetime import date
from random import Random

import pytest

from data.sources import dates
from data.sources.dates import HELD_OUT_YEARS, SampleDates, build_sample_dates, chinese_number, rows, write


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, str]]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dates, "TRAIN_ROWS", 4000)
        files = build_sample_dates(tmp_path_factory.mktemp("cache"))
    return {
        name: [json.loads(line) for line in getattr(files, name).read_text(encoding="utf8").splitlines()]
        for name in SampleDates.__dataclass_fields__
    }


def test_rows_are_held_out(built: dict[str, list[dict[str, str]]]) -> None:
    texts = [row["prompt"] for rows in built.values() for row in rows]
    assert len(texts) == len(set(texts)), "no row stands in two files"
    assert {len(rows) for name, rows in built.items() if name != "train"} == {dates.HELD_OUT_ROWS}
    years = {name: {date.fromisoformat(row["response"]).year for row in rows} for name, rows in built.items()}
    assert years.pop("years") == HELD_OUT_YEARS
    assert HELD_OUT_YEARS.isdisjoint(set[int]().union(*years.values()))


def test_the_same_rows_each_time() -> None:
    """Shards of earlier versions were made of these."""
    forms = ("{weekday}, {day} {month} {year}", "{cyear}年{cmonth}月{cday}日")
    assert list(rows(Random(0), forms, held_out=False, count=3, texts=set())) == [
        ("二〇三八年四月一日", "2038-04-01"),
        ("Tue, 23 May 1978", "1978-05-23"),
        ("一九五二年九月二十七日", "1952-09-27"),
    ]


def test_a_day_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dates, "SLIP", 0.0)
    day = date(2021, 3, 23)
    draw = Random(0)
    assert write(day, "the {word} of {ordinal}", draw) == "the twenty-third of 23rd"
    assert write(day, "{cmonth}月{cday}日", draw) == "三月二十三日"
    assert write(day, "{cyear}", draw) in ("二〇二一", "二零二一")
    assert write(day, "{weekday}", draw).rstrip(".") in ("Tuesday", "Tue")
    assert [chinese_number(number) for number in (1, 10, 12, 20, 31)] == ["一", "十", "十二", "二十", "三十一"]
