from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from random import Random

import pytest

from data.sources import dates
from data.sources.dates import CHINESE, ENGLISH, HELD_OUT_YEARS, SampleDates, build_sample_dates, chinese_number, write


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


def test_forms_held_out_are_in_their_own_file_alone(built: dict[str, list[dict[str, str]]]) -> None:
    def of_form(text: str) -> bool:
        english = "the" in text.lower().split()[1:2] and any(letter.isdigit() for letter in text.split()[2][:1])
        return english and not text.lower().split()[0].startswith(("mon", "tue", "wed", "thu", "fri", "sat", "sun"))

    plain = [row["prompt"].strip() for row in built["train"] if len(row["prompt"].split()) > 2]
    assert not any(
        of_form(text) for text in plain if text.split()[0].rstrip(".,").lower() in ("june", "october", "may")
    )
    assert dates.HELD_OUT_FORMS["english"] not in ENGLISH and dates.HELD_OUT_FORMS["chinese"] not in CHINESE


def test_the_same_rows_each_time(tmp_path: Path, built: dict[str, list[dict[str, str]]]) -> None:
    again = build_sample_dates(tmp_path).valid.read_text(encoding="utf8").splitlines()
    assert [json.loads(line) for line in again] == built["valid"]


@pytest.mark.parametrize("form", [*ENGLISH, *CHINESE, *dates.HELD_OUT_FORMS.values()])
def test_every_form_tells_year_month_and_day(form: str) -> None:
    for parts in (("year", "cyear"), ("month", "m", "mm", "cmonth"), ("day", "dd", "ordinal", "word", "cday")):
        assert sum(f"{{{part}}}" in form for part in parts) == 1


def test_a_day_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dates, "SLIP", 0.0)
    day, draw = date(2021, 3, 23), Random(0)
    assert write(day, "the {word} of {ordinal}", draw) == "the twenty-third of 23rd"
    assert write(day, "{cmonth}月{cday}日", draw) == "三月二十三日"
    assert write(day, "{cyear}", draw) in ("二〇二一", "二零二一")
    assert write(day, "{weekday}", draw).rstrip(".") in ("Tuesday", "Tue")


def test_chinese_numbers() -> None:
    assert [chinese_number(number) for number in (1, 10, 12, 20, 31)] == ["一", "十", "十二", "二十", "三十一"]


def test_slips_leave_the_first_and_last_letter_of_a_name() -> None:
    draw = Random(1)
    slipped = {dates._slipped("February", draw) for _ in range(50)}
    assert len(slipped) > 10 and all(word[0] == "F" and len(word) in (7, 8, 9) for word in slipped)
    assert dates._slipped("May", draw) == "May"
