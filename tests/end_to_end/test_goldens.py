"""Losses and plans are those that were recorded; `goldens.json` says of which day."""

from __future__ import annotations

import json

import pytest

from tests.end_to_end import goldens
from tests.end_to_end.world import World

RECORDED = json.loads(goldens.FILE.read_text("utf8"))


def test_losses_after_20_steps(world: World) -> None:
    assert goldens.losses(world) == pytest.approx(RECORDED["losses"], rel=1e-5)


def test_plans(world: World) -> None:
    planned = goldens.plans(world.place)
    assert planned.keys() == RECORDED["plans"].keys()
    for flags, figures in planned.items():
        assert figures == pytest.approx(RECORDED["plans"][flags], rel=0.08), flags
