"""Promise and truth stand side by side, and a fit finds the constants that steps were made with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks import time_promise
from config import load
from memory.cost.prediction import Choice, Machine
from memory.cost.speed import Pace, typical_seconds
from memory.cost.work import choice_fields
from units import GIB, MIB

MACHINE = Machine(GIB, GIB, rates=(("float32", 8e10), ("bfloat16", 1e9)))


def case(took: float = 20.0, **flags: Any) -> dict[str, Any]:
    choice = Choice(8, 1, 1, 0, 8, "float32", "float32", 32 * MIB, "fast")
    flags = {"model_preset": "tiny", "letters": (60, 120), "effective_batch_size": 8, "max_steps": 30, **flags}
    return {
        "flags": flags, "choice": choice.as_dict(), "promised": [10.0, 16.0, 25.0], "took": took, "step_promised": 0.5,
        "step_took": 0.6, "left_promised": 5.0, "left_in_steps": 6.0,
    }  # fmt: skip


def test_cases_are_settings_that_exist_and_no_two_are_alike() -> None:
    cases = time_promise.cases()
    for flags in cases:
        load("train", {"train_file": "x", **{name: str(v) for name, v in flags.items() if name != "letters"}})
    assert len({str(sorted(flags.items())) for flags in cases}) == len(cases)


def test_the_table_tells_what_was_kept() -> None:
    body = time_promise.body_of([case(), case(took=30.0), {"flags": {}, "failed": "no memory"}])
    assert body.startswith("1 of 2 runs took a time within the promised range")
    lines = [line for line in body.splitlines() if "letters" in line]
    assert "| 16.0 (10.0-25.0) | 20.0 | yes |" in lines[0] and "**no**" in lines[1]


def test_a_fit_finds_what_the_steps_were_made_with() -> None:
    truth = Pace(efficiency=0.7, half_tokens=120, block_seconds=5e-4)
    notes = [
        case(letters=letters, effective_batch_size=rows, d_model=width, d_ff=4 * width)
        for letters in ((10, 20), (100, 250)) for rows in (2, 32) for width in (128, 512)
    ]  # fmt: skip
    for one in notes:
        rows = one["flags"]["effective_batch_size"]
        one["choice"] = replace(Choice(**choice_fields(one["choice"])), batch_size_per_gpu=rows).as_dict()
        work, choice = time_promise.work_of(one, MACHINE)
        one["step_took"] = typical_seconds(work, choice, MACHINE, truth)
    error = time_promise.step_error(notes, MACHINE)
    found = time_promise.fit(error, Pace())
    assert error(truth) == pytest.approx(0.0) and error(Pace()) > 0.05
    assert error(found) < 0.01 * error(Pace())
