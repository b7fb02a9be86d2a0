"""Dates as people write them, in English and Chinese: a task that a small model learns and anyone can check.

A row is a written date and its ISO form: "Wed, the 3rd of March, 2021" -> 2021-03-03, 二〇二一年三月三日 -> 2021-03-03. Made by
rule with the standard library: weekdays, ordinals, abbreviations, Chinese numerals, and slips (letters lost, doubled or
swapped in long names, capitals, commas and spaces gone, wrong endings of ordinals, full-width digits). Every date is
of the years 1900 to 2099, and tells its year in full, so that each text has one right answer.

Some years and two written forms are held out whole: an answer to those was not learnt by heart.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from random import Random

from support.storage import make_once

FORMAT = 1  # raise it when the rows change
FIRST = date(1900, 1, 1)
LAST = date(2099, 12, 31)
HELD_OUT_YEARS = frozenset(range(1903, 2100, 11))  # 18, spread over all decades and last digits
TRAIN_ROWS = 40_000
HELD_OUT_ROWS = 1000
SLIP = 0.2  # share of rows with one
SHORTEST_SLIPPED = 5  # letters of a name; of shorter ones too little would be left

MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]
WEEKDAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
UNITS = ["first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth"]
TEENS = [
    "tenth",
    "eleventh",
    "twelfth",
    "thirteenth",
    "fourteenth",
    "fifteenth",
    "sixteenth",
    "seventeenth",
    "eighteenth",
    "nineteenth",
]
ORDINALS = ("", *UNITS, *TEENS, "twentieth", *map("twenty-{}".format, UNITS), "thirtieth", "thirty-first")
NUMERALS = "〇一二三四五六七八九"
TENS = ("", "十", "二十", "三十")
ORDINARY = "0123456789"
WIDE = "０１２３４５６７８９"

ENGLISH = (
    "{month} {day}, {year}",
    "{day} {month} {year}",
    "{ordinal} {month} {year}",
    "{ordinal} {month}, {year}",
    "the {ordinal} of {month}, {year}",
    "the {ordinal} of {month} {year}",
    "{month} {ordinal}, {year}",
    "{month} {ordinal} {year}",
    "{weekday}, {month} {day}, {year}",
    "{weekday} {day} {month} {year}",
    "{weekday}, {day} {month} {year}",
    "{weekday} the {ordinal} of {month}, {year}",
    "the {word} of {month}, {year}",
    "the {word} of {month} {year}",
    "{month} the {word}, {year}",
    "{weekday}, {month} the {word}, {year}",
    "on {weekday}, {month} {ordinal}, {year}",
    "{day}-{month}-{year}",
    "{year} {month} {day}",
    "{year}, {ordinal} of {month}",
    "{year}/{mm}/{dd}",
    "{year}.{m}.{day}",
    "{year} {mm} {dd}",
)
CHINESE = (
    "{year}年{m}月{day}日",
    "{year}年{m}月{day}号",
    "{year}年{mm}月{dd}日",
    "{year} 年 {m} 月 {day} 日",
    "公元{year}年{m}月{day}日",
    "{year}年{m}月{day}日 {xingqi}",
    "{year}年{m}月{day}日（{xingqi}）",
    "{xingqi}，{year}年{m}月{day}日",
    "{cyear}年{cmonth}月{cday}日",
    "{cyear}年{cmonth}月{cday}号",
    "{cyear}年{cmonth}月{cday}日，{xingqi}",
    "{xingqi}，{cyear}年{cmonth}月{cday}日",
    "公元{cyear}年{cmonth}月{cday}日",
    "{year}年{cmonth}月{cday}日",
)
HELD_OUT_FORMS = {"english": "{month} the {ordinal}, {year}", "chinese": "{cyear}年{m}月{day}日"}


@dataclass(frozen=True)
class SampleDates:
    """Files of pairs, JSONL with prompt and response: `train` and `valid`; held out `years`, `english` and
    `chinese`.
    """

    train: Path
    valid: Path
    years: Path
    english: Path
    chinese: Path


def build_sample_dates(cache_dir: str | Path) -> SampleDates:
    """Make the rows under `cache_dir`, or find them there.

    Raises:
        UserError: the folder cannot be written.
    """
    folder = Path(cache_dir) / f"sample-dates-{FORMAT}"
    make_once(folder, _build)
    return SampleDates(*(folder / f"{name}.jsonl" for name in SampleDates.__dataclass_fields__))


def _build(folder: Path) -> None:
    folder.mkdir()
    texts: set[str] = set()
    everything = (*ENGLISH, *CHINESE)
    parts: dict[str, tuple[int, tuple[str, ...], bool]] = {
        "train": (TRAIN_ROWS, everything, False),
        "valid": (HELD_OUT_ROWS, everything, False),
        "years": (HELD_OUT_ROWS, everything, True),
        **{name: (HELD_OUT_ROWS, (form,), False) for name, form in HELD_OUT_FORMS.items()},
    }
    for number, (name, (count, forms, held_out)) in enumerate(parts.items()):
        dates = rows(Random(number), forms, held_out, count, texts)
        lines = (json.dumps({"prompt": text, "response": iso}, ensure_ascii=False) + "\n" for text, iso in dates)
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf8")


def rows(
    draw: Random, forms: tuple[str, ...], held_out: bool, count: int, texts: set[str]
) -> Iterator[tuple[str, str]]:
    """Draw written dates and their ISO form.

    Args:
        forms: of which each row takes one. held_out: of the years held out, or of the others.
        texts: that no row repeats; grows.
    """
    while count:
        day = FIRST + timedelta(draw.randrange((LAST - FIRST).days + 1))
        text = write(day, draw.choice(forms), draw)
        if (day.year in HELD_OUT_YEARS) == held_out and text not in texts:
            texts.add(text)
            count -= 1
            yield text, day.isoformat()


def write(day: date, form: str, draw: Random) -> str:
    """One way to write a day in a form, now and then with a slip."""
    slips = draw.random() < SLIP
    month = _short(MONTHS[day.month - 1], draw)
    weekday = _short(WEEKDAYS[day.weekday()], draw)
    ordinal = f"{day.day}{_ending(day.day)}"
    if slips and form in (*ENGLISH, HELD_OUT_FORMS["english"]):
        month = _slipped(month, draw)
        weekday = _slipped(weekday, draw)
        if draw.random() < 0.3:
            ordinal = f"{day.day}{draw.choice(('th', 'st', ''))}"
    text = form.format(
        year=day.year,
        m=day.month,
        mm=f"{day.month:02}",
        day=day.day,
        dd=f"{day.day:02}",
        month=month,
        weekday=weekday,
        ordinal=ordinal,
        word=ORDINALS[day.day],
        cyear=_digits(day.year, draw),
        cmonth=chinese_number(day.month),
        cday=chinese_number(day.day),
        xingqi=draw.choice(("星期", "周", "礼拜")) + "一二三四五六日"[day.weekday()],
    )
    return draw.choice(CARELESS)(text) if slips else text


CARELESS: tuple[Callable[[str], str], ...] = (
    str.lower,
    str.upper,
    lambda text: text.replace(",", "").replace("，", ""),
    lambda text: text.replace(", ", ",").replace(" 年 ", "年"),
    lambda text: text.replace(" ", "  "),
    lambda text: f" {text}. " if text.isascii() else text.translate(str.maketrans(ORDINARY, WIDE)),
)


def _short(name: str, draw: Random) -> str:
    """The whole name, or its beginning, with or without a full stop."""
    short = name[:4] if name == "September" and draw.random() < 0.5 else name[:3]
    return draw.choice((name, name, short, name if name == short else f"{short}."))


def _slipped(name: str, draw: Random) -> str:
    """A long name with one letter lost, doubled, or swapped with the next."""
    if len(name) < SHORTEST_SLIPPED:
        return name
    slip = draw.randrange(1, len(name) - 1)
    before = name[:slip]
    letter = name[slip]
    after = name[slip + 1 :]
    return draw.choice((before + after, before + letter + letter + after, before + after[0] + letter + after[1:]))


def _ending(number: int) -> str:
    return "th" if number in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")


def _digits(year: int, draw: Random) -> str:
    zero = draw.choice(("〇", "〇", "零"))
    return str(year).translate(str.maketrans(ORDINARY, NUMERALS)).replace("〇", zero)


def chinese_number(number: int) -> str:
    """1 to 31 as it is said: 三, 十, 十二, 二十, 三十一."""
    tens, units = divmod(number, 10)
    return f"{TENS[tens]}{NUMERALS[units]}".removesuffix(NUMERALS[0])
