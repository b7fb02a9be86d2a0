"""The picture of bars: well-formed, to scale, and nothing outside its frame."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from commands.diagnosis.chart import LEFT, WIDTH, Bars, bar_chart

SVG = "{http://www.w3.org/2000/svg}"
LINES = [
    Bars("length", "64", (100.0, 110.0), "110, +10%"),
    Bars("length", "128", (200.0, None), "killed <by> the system & gone", True),
    Bars("batch", "4", (None, None), "does not fit", True),
]


def drawn(**options: object) -> ElementTree.Element:
    return ElementTree.fromstring(bar_chart("a < b", ("predicted", "measured"), LINES, **options))  # type: ignore[arg-type]


def bars(picture: ElementTree.Element) -> list[float]:
    return [float(r.get("width", 0)) for r in picture.iter(f"{SVG}rect") if r.get("x") == str(LEFT)]


def words(picture: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in picture.iter(f"{SVG}text")]


def test_bars_are_to_scale_and_absent_values_have_none() -> None:
    first, second, third = bars(drawn())
    assert second / first == pytest.approx(1.1, rel=0.01) and third / first == pytest.approx(2.0, rel=0.01)


def test_every_word_is_there_as_it_was_written() -> None:
    found = words(drawn())
    for word in (
        "a < b",
        "predicted",
        "measured",
        "length",
        "batch",
        "64",
        "killed <by> the system & gone",
        "does not fit",
    ):
        assert found.count(word) == 1


def test_everything_lies_inside_the_frame() -> None:
    picture = drawn(limit=(220.0, "budget"))
    width, height = float(picture.get("width", 0)), float(picture.get("height", 0))
    assert width == WIDTH
    for shape in picture.iter():
        x, y = float(shape.get("x", 0)), float(shape.get("y", 0))
        assert (
            x >= 0
            and x + float(shape.get("width", 0)) <= width
            and y >= 0
            and y + float(shape.get("height", 0)) <= height
        )


def test_the_limit_is_a_line_where_it_belongs_and_away_where_it_would_squeeze_the_bars() -> None:
    near = drawn(limit=(220.0, "budget"))
    (line,) = near.iter(f"{SVG}line")
    assert float(line.get("x1", 0)) - LEFT == pytest.approx(bars(near)[2] * 1.1, abs=1)
    assert "budget" in words(near)
    far = drawn(limit=(9000.0, "budget"))
    assert not list(far.iter(f"{SVG}line")) and bars(far) == bars(drawn())
