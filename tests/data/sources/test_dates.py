from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from random import Random

import pytest

from data.sources import dates
from data.sources.dates import HELD_OUT_YEARS, SampleDates, build_sample_dates, chinese_number, write


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, str]]]:
    files = build_sample_dates(tmp_path_factory.mktemp("cache"))
    return {
        name: [json.loads(line) for line in getattr(files, name).read_text(encoding="utf8").splitlines()]
        for name in SampleDates.__dataclass_fields__
    }


def test_no_row_stands_in_two_places(built: dict[str, list[dict[str, str]]]) -> None:
    texts = [row["prompt"] for rows in built.values() for row in rows]
    assert len(texts) == len(set(texts))
    assert {len(rows) for name, rows in built.items() if name != "train"} == {dates.HELD_OUT_ROWS}


def test_years_held_out_are_never_trained_on(built: dict[str, list[dict[str, str]]]) -> None:
    years = {name: {date.fromisoformat(row["response"]).year for row in rows} for name, rows in built.items()}
    assert years["years"] <= HELD_OUT_YEARS and len(years["years"]) == len(HELD_OUT_YEARS)
    assert not any(years[name] & HELD_OUT_YEARS for name in years if name != "years")


def test_the_same_rows_each_time(tmp_path: Path, built: dict[str, list[dict[str, str]]]) -> None:
    again = build_sample_dates(tmp_path).valid.read_text(encoding="utf8").splitlines()
    assert [json.loads(line) for line in again] == built["valid"]


def test_a_day_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dates, "SLIP", 0.0)
    day, draw = date(2021, 3, 23), Random(0)
    assert write(day, "the {word} of {ordinal}", draw) == "the twenty-third of 23rd"
    assert write(day, "{cmonth}月{cday}日", draw) == "三月二十三日"
    assert write(day, "{cyear}", draw) in ("二〇二一", "二零二一")
    assert write(day, "{weekday}", draw).rstrip(".") in ("Tuesday", "Tue")


def test_chinese_numbers() -> None:
    assert [chinese_number(number) for number in (1, 10, 12, 20, 31)] == ["一", "十", "十二", "二十", "三十一"]
