"""A machine is lost in the middle of a run over two, and comes back: the losses are those of an undisturbed run."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.two_hosts import STEPS, can_make_hosts, rehearse
from tests.end_to_end.world import SAME, World


@pytest.mark.slow
def test_a_lost_host_rejoins(world: World, tmp_path: Path) -> None:
    if not can_make_hosts():
        pytest.skip("network namespaces take Linux, ip and root")
    expected, found = rehearse(tmp_path, world.text, world.place.cache)
    assert list(found) == list(range(1, STEPS + 1)) == list(expected)
    assert max(abs(found[step] / expected[step] - 1) for step in expected) < SAME
