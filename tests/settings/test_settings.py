"""Raw words become values of the right type, or sentences that say what is allowed."""

from __future__ import annotations

import dataclasses
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from config import load
from settings import precedence
from settings.errors import DoesNotFit, UserError
from settings.fields import allowed, counted, nearest_name, parse, read_settings_file, setting, show
from settings.help import versions
from settings.packages import needs


def field_of(**facts: Any) -> dataclasses.Field[Any]:
    made = dataclasses.make_dataclass("Made", [("x", object, setting(facts.pop("default", None), "help", **facts))])
    return dataclasses.fields(made)[0]


@pytest.mark.parametrize("content", [None, "{", "[1]"])
def test_without_the_record_of_shipped_defaults_none_counts_as_edited(
    content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precedence, "SHIPPED", tmp_path / "shipped.json")
    if content is not None:
        precedence.SHIPPED.write_text(content)
    assert precedence._shipped.__wrapped__() == {}


def test_a_package_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said = r"--format = gguf, needs the package no-such-package, which is not installed; run: \S+ -m pip install no-such-package"
    with pytest.raises(UserError, match=said):
        needs("no-such-package", "--format = gguf", module="no_such_package")
    (tmp_path / "half_there.py").write_text("import no_such_package")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=r"half-there, which does not load here \(No module named 'no_such_package'\)"):
        needs("half-there", "--format = gguf", module="half_there")

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert "torch missing" in versions()


@pytest.mark.parametrize("word", ["true", "True", "YES", "on", "1", True, 1])
def test_true_words(word: object) -> None:
    assert parse(field_of(kind=bool), word) is True


@pytest.mark.parametrize("word", ["false", "False", "NO", "off", "0", False, 0])
def test_false_words(word: object) -> None:
    assert parse(field_of(kind=bool), word) is False


@pytest.mark.parametrize("word", ["maybe", "2", "", "tru"])
def test_other_words_are_no_switch(word: str) -> None:
    with pytest.raises(ValueError, match="neither true nor false"):
        parse(field_of(kind=bool), word)


@pytest.mark.parametrize(
    ("kind", "word", "value"),
    [
        (int, "12", 12),
        (int, "1e3", 1000),
        (int, 3.0, 3),
        (int, "9007199254740993", 9007199254740993),  # more than a float can hold exactly
        (float, "1e-4", 1e-4),
        (float, 2, 2.0),
        ("size", "6G", 6 * 2**30),
        ("size", "1.5GiB", 3 * 2**29),
        ("size", 1024, 1024),
        (str, "1e5", "1e5"),
        (str, " a b ", "a b"),
    ],
)
def test_values(kind: Any, word: object, value: object) -> None:
    parsed = parse(field_of(kind=kind), word)
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("kind", "word"),
    [
        (int, "1.5"),
        (int, "inf"),
        (int, "nan"),
        (int, "five"),
        (int, True),
        (float, "nan"),
        (float, "inf"),
        (float, float("-inf")),
        (float, ""),
        (float, [1]),
    ],
)
def test_what_is_no_number(kind: Any, word: object) -> None:
    with pytest.raises(ValueError, match=r"number|needs a value"):
        parse(field_of(kind=kind), word)


@pytest.mark.parametrize("word", ["-1G", "0", "6X", "", True, "G"])
def test_what_is_no_size(word: object) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse(field_of(kind="size"), word)


def test_ranges_are_inclusive_and_above_is_not() -> None:
    ranged, positive = field_of(kind=float, low=0.0, high=1.0), field_of(kind=float, above=0.0)
    assert parse(ranged, 0) == 0.0 and parse(ranged, 1) == 1.0 and parse(positive, 1e-9) == 1e-9
    for field, value in [(ranged, -0.1), (ranged, 1.1), (positive, 0)]:
        with pytest.raises(ValueError, match="out of range; allowed"):
            parse(field, value)


def test_auto_and_none_only_where_allowed() -> None:
    assert parse(field_of(kind=int, auto=True), " AUTO ") == "auto"
    assert parse(field_of(kind=int, optional=True), "None") is None
    assert parse(field_of(kind=str, optional=True), "") is None
    with pytest.raises(ValueError, match="whole number"):
        parse(field_of(kind=int), "auto")
    with pytest.raises(ValueError, match="whole number"):
        parse(field_of(kind=int), "none")


def test_choices_name_the_nearest() -> None:
    field = field_of(kind=str, choices=("cosine", "constant"))
    assert parse(field, "cosine") == "cosine"
    with pytest.raises(ValueError, match=r"allowed: cosine, constant; did you mean cosine\?"):
        parse(field, "cosin")


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        (dict(kind=int, low=1, auto=True, unit="rows"), "auto or 1 or more, rows"),
        (dict(kind=float, low=0.0, high=1.0), "0 to 1"),
        (dict(kind=float, above=0.0, high=1.0), "more than 0 up to 1"),
        (dict(kind=bool), "True | False"),
        (dict(kind="size", auto=True), "auto or a size such as 6G or 512M"),
        (dict(kind=str, choices=("a", "b"), auto=True), "auto or a | b"),
        (dict(kind=str, optional=True), "text or none"),
    ],
)
def test_allowed_in_words(facts: dict[str, Any], text: str) -> None:
    assert allowed(field_of(**facts).metadata) == text


def test_values_are_shown_as_typed() -> None:
    assert show(field_of(kind="size"), 6 * 2**30) == "6.00 GiB"
    assert show(field_of(kind="size", auto=True), "auto") == "auto"
    assert show(field_of(kind=int), 5) == "5"


def test_a_single_thing_has_no_plural() -> None:
    assert [counted(1, "row"), counted(2249, "row"), counted(0, "row")] == ["1 row", "2,249 rows", "0 rows"]
    assert [counted(1, "process"), counted(2, "process")] == ["1 process", "2 processes"]


def test_a_number_that_is_none_is_told_what_is_allowed() -> None:
    with pytest.raises(ValueError, match="is not a whole number; allowed: auto or 1 or more, steps"):
        parse(field_of(kind=int, low=1, auto=True, unit="steps"), "abc")


def test_nearest_name() -> None:
    assert "--max_steps?" in nearest_name("max_step", ["max_steps", "seed"])
    assert "--noise_density=VALUE" in nearest_name("ise_density", ["noise_density"])
    assert "--help" in nearest_name("zzz", ["max_steps"])


def test_errors_carry_exit_codes_and_all_problems() -> None:
    assert UserError("a", "b").problems == ["a", "b"]
    assert (UserError("a").exit_code, DoesNotFit("a").exit_code) == (2, 3)
    assert isinstance(DoesNotFit("a"), UserError)


@pytest.mark.parametrize(
    "text, told",
    [
        ("3: 4\nnull: 5\n", "the name 3 is int, not a text"),
        (f"seed: 0x{'f' * 5000}\n", "a whole number of 20,000 bits"),
        (f"? 0x{'f' * 5000}\n: 1\n", "a whole number of 20,000 bits"),
        ("2001-01-01: 4\n", "the name 2001-01-01 is date, not a text"),
        ("max_steps: 2001-99-99\n", "cannot be read: month must be in 1..12"),
        ("max_steps: " + "9" * 5000 + "\n", "cannot be read: Exceeds the limit|cannot be read"),
        ("max_steps: !!bool maybe\n", "cannot be read"),
        ("seed: 3\nmax_steps: [1", "cannot be read: line 2: expected ',' or '\\]'"),
        ("max_steps: " + "[" * 3000 + "]" * 3000, "cannot be read"),
        ("? [1, 2]\n: 3\n", "cannot be read|is tuple, not a text"),
    ],
)
def test_a_file_of_settings_that_makes_no_sense_is_told_by_name(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    if text.startswith("max_steps: 9") and not hasattr(sys, "get_int_max_str_digits"):
        pytest.skip("this Python reads numbers of any length")
    with pytest.raises(UserError, match=told) as caught:
        read_settings_file(tmp_path / "a.yaml")
    assert str(tmp_path / "a.yaml") in str(caught.value)


def test_a_value_that_repeats_itself_is_not_printed(tmp_path: Path) -> None:
    """YAML can name one list a billion times in a few lines."""
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    lines += [f"{new}: &{new} [{', '.join(['*' + old] * 9)}]" for old, new in zip("abcdefgh", "bcdefghi", strict=True)]
    (tmp_path / "a.yaml").write_text("\n".join([*lines, "max_steps: *i"]))
    with pytest.raises(UserError, match="--max_steps, is given a table") as caught:
        load("train", {"config": str(tmp_path / "a.yaml")})
    assert len(str(caught.value)) < 5000


def test_an_infinite_size_is_no_size() -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse(field_of(kind="size"), "1e999G")
