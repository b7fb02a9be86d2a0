"""What a preference run tells of itself."""

from __future__ import annotations

import json

import pytest

from tests.end_to_end.world import World

FIGURES = {
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
}


def test_a_run_learns_what_is_preferred_and_tells_of_it(world: World) -> None:
    run = world.path("preferences")
    events = world.place.events("preferences")
    steps = [event for event in events if event["event"] == "step"]
    evaluations = [event for event in events if event["event"] == "eval"]
    assert all(set(event) > FIGURES for event in (*steps, *evaluations))
    assert steps[0]["loss"] == pytest.approx(0.6931, abs=1e-3), "the model begins as its own reference"
    assert evaluations[0]["rewards/accuracies"] == steps[0]["rewards/accuracies"] == 0.5, "all pairs are ties"
    assert evaluations[-1]["loss"] < 0.6 and evaluations[-1]["rewards/accuracies"] == 1.0
    for event in steps:
        margin = event["rewards/chosen"] - event["rewards/rejected"]
        assert event["rewards/margins"] == pytest.approx(margin, abs=1e-9)
    assert json.loads((run / "run.json").read_text())["kind"] == "dpo"
    name = "generation_config.json"  # As long as its base answers, which its own rows need not say.
    assert (run / name).read_text() == (world.path("whole") / name).read_text()
    measured = world.place.do("evaluate", f"--model={run}")
    assert "perplexity" in measured.stdout, "of the answers that were chosen"
