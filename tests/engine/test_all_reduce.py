"""Gradients are summed over processes, and a process that fails in the middle of a pass leaves nobody waiting."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import must_succeed

CHILD = Path(__file__).with_name("children") / "all_reduce_child.py"


@pytest.mark.parametrize("failing_group", ["0", "3 hosts"])
def test_a_failed_process_stops_all_at_the_same_place(failing_group: str) -> None:
    must_succeed(CHILD, 2, *failing_group.split())
