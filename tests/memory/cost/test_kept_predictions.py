"""What the formulas predict stays what was compared with measurements, in every part of every phase."""

from __future__ import annotations

import json

import pytest

from tests.golden.make_predictions import PATH, cases, of_disk, of_step, of_writing

KEPT = json.loads(PATH.read_text(encoding="utf8"))
NEAR = {"rel": 1e-3, "abs": 1e-9}  # what is added in another order may differ in its last places
WHY = "changed on purpose? measure again, then python -m tests.golden.make_predictions"


@pytest.mark.parametrize("name", [*cases(), "writing", "disk"])
def test_a_prediction_stays(name: str) -> None:
    found = {"writing": of_writing, "disk": of_disk}[name]() if name in ("writing", "disk") else of_step(*cases()[name])
    assert found.keys() == KEPT[name].keys(), WHY
    for phase, parts in found.items():
        assert parts == pytest.approx(KEPT[name][phase], **NEAR), f"{phase}: {WHY}"


def test_nothing_is_kept_that_is_not_compared() -> None:
    assert set(KEPT) == {*cases(), "writing", "disk"}
