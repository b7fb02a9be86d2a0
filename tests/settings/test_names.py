"""One rule for names of runs, with room for what a name becomes a part of."""

from __future__ import annotations

import pytest

from settings.names import LONGEST_NAME, LONGEST_NAME_BYTES, name_problem, shown_name


@pytest.mark.parametrize("name", ["x" * LONGEST_NAME, "训" * (LONGEST_NAME_BYTES // 3), "v1.2"])
def test_names_that_can_be(name: str) -> None:
    assert name_problem(name) is None


@pytest.mark.parametrize("name", ["x" * (LONGEST_NAME + 1), "训" * (LONGEST_NAME_BYTES // 3 + 1), "x" * 300])
def test_names_that_are_too_long_are_told_what_is_allowed(name: str) -> None:
    told = name_problem(name)
    assert told is not None and f"of {len(name)} letters, {len(name.encode())} bytes" in told
    assert "allowed: 120 letters and 200 bytes" in told


@pytest.mark.parametrize("name", ["", "..", "a/b", "a:b", "a\n", "a ", "m\udcfe"])
def test_names_that_are_no_folders(name: str) -> None:
    assert "is no folder name" in (name_problem(name) or "")


def test_a_long_name_is_shown_in_part() -> None:
    assert shown_name("x" * 80) == "x" * 80 and shown_name("x" * 300) == "x" * 80 + "..."
