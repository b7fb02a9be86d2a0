"""Losses and plans are those that were recorded; `goldens.json` says of which day."""

from __future__ import annotations

import json

import pytest

from tests.end_to_end import goldens
from tests.end_to_end.world import World

RECORDED = json.loads(goldens.FILE.read_text("utf8"))


# Sums of another order change the pretraining runs by 4e-6. Finetuning begins where they ended and takes steps so large
# that 1e-6 of a weight becomes 1% of a loss.
TOLERANCE = {"whole": 1e-5, "prefix": 1e-5}
TOLERANCE_OF_LARGE_STEPS = 0.03


def test_losses_after_20_steps(world: World) -> None:
    losses = goldens.losses(world)
    assert losses.keys() == RECORDED["losses"].keys()
    for run, loss in losses.items():
        tolerance = TOLERANCE.get(run, TOLERANCE_OF_LARGE_STEPS)
        assert loss == pytest.approx(RECORDED["losses"][run], rel=tolerance), run


QUICK_PLANS = 3  # A laptop twice, a GPU; the others take the same paths with other models.


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(flags, marks=[pytest.mark.slow] * (number >= QUICK_PLANS))
        for number, flags in enumerate(goldens.PLANS)
    ],
)
def test_a_plan(world: World, flags: str) -> None:
    assert goldens.figures_of_plan(world.place, flags) == pytest.approx(RECORDED["plans"][flags], rel=0.08)
