"""From text to a trained model: what a run writes into its folder, its log and the screen."""

from __future__ import annotations

import re

from memory.estimate.time import RENEWED_STEPS
from tests.end_to_end.world import STEPS, World

MODEL_FILES = {"config.json", "model.safetensors", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
# event -> fields that programs read
FIELDS = {
    "start": {"step", "run_name", "settings"},
    "plan": {"choice", "effective_batch_size", "budget_bytes", "peak_bytes", "components", "phases", "seconds"},
    "step": {
        "step",
        "loss",
        "learning_rate",
        "tokens",
        "seconds",
        "tokens_per_second",
        "batch_size_per_gpu",
        "gradient_accumulation_steps",
    },
    "memory": {
        "step",
        "phase",
        "anon_bytes",
        "file_bytes",
        "peak_bytes",
        "budget_bytes",
        "device_bytes",
        "device_peak_bytes",
    },
    "eval": {"step", "loss"},
    "cleanup": {"step", "kind", "freed_bytes"},
    "checkpoint": {"step", "path"},
    "sample": {"prompt", "answer", "reference"},
    "end": {"planned_peak_bytes", "measured_peak_bytes", "tokens_per_second", "best_eval_loss"},
}


def test_a_run_learns_and_leaves_a_whole_folder(pretrained: World) -> None:
    place, folder = pretrained.place, pretrained.place.runs / "whole"
    losses = place.losses("whole")
    assert list(losses) == list(range(1, STEPS + 1))
    assert losses[STEPS] < losses[1] - 0.5
    assert {path.name for path in folder.iterdir()} >= MODEL_FILES
    checkpoints = {path.name: path for path in (folder / "checkpoints").iterdir()}
    assert set(checkpoints) == {"best", "latest", "step_00000020", f"step_{STEPS:08}"}
    for checkpoint in checkpoints.values():
        assert {path.name for path in checkpoint.iterdir()} >= {*MODEL_FILES, "state"}
    assert (folder / "checkpoints" / "latest").resolve().name == f"step_{STEPS:08}"
    # Beside it, another worker may be making a run of the world right now.
    assert not [path for path in folder.rglob("*") if ".tmp" in path.name or path.name.endswith(".partial")]


def test_metrics_hold_what_programs_read(pretrained: World) -> None:
    events = pretrained.place.events("whole")
    assert {event["event"] for event in events} == set(FIELDS)
    for event in events:
        assert set(event) >= FIELDS[event["event"]], event["event"]
    assert [event["event"] for event in events[:2]] == ["start", "plan"] and events[-1]["event"] == "end"
    assert [event["step"] for event in events if event["event"] == "eval"] == [0, 12, STEPS]
    assert {event["kind"] for event in events if event["event"] == "cleanup"} <= {"light", "full"}
    plan = events[1]
    assert 0 < plan["seconds_low"] < plan["seconds_total"] < plan["seconds_high"]
    (renewed,) = [event["step"] for event in events if "seconds_left" in event]
    assert renewed == RENEWED_STEPS, "the time that is left is told anew, once"
    screen = pretrained.screen_of("whole").read_text("utf8")
    assert f"step {RENEWED_STEPS}: about" in screen and "(predicted: about" in screen
    end = events[-1]
    assert end["seconds_since_plan"] > 0
    assert 0 < end["measured_peak_bytes"] <= end["budget_bytes"]
    assert end["best_eval_loss"] == min(event["loss"] for event in events if event["event"] == "eval")


def test_the_log_answers_the_command_of_the_guides(pretrained: World) -> None:
    log = min(pretrained.place.logs.glob("chat_trainer_low_mem_*.log"))
    assert re.fullmatch(r"chat_trainer_low_mem_\d{8}_\d{6}_\w+\.log", log.name)
    lines = [line for line in log.read_text("utf8").splitlines() if "内存监控" in line]
    records = [event for event in pretrained.place.events("whole") if event["event"] == "memory"]
    assert len(lines) == len(records) >= 3
    told = log.read_text("utf8")
    for line in (
        "activation checkpointing: 0 of 3 blocks recomputed",
        "predicted peak: ",
        "peak memory: ",
        "peak: planned ",
        "ended: all done",
    ):
        assert f"| {line}" in told, "who looks a day later has the log alone"


def test_the_screen_ends_with_plan_against_measured_and_samples(pretrained: World) -> None:
    screen = pretrained.screen_of("whole").read_text("utf8")
    assert re.search(r"peak +planned .*iB, measured .*iB", screen)
    before, _, after = screen.partition("\ndone\n")
    assert len(re.split(r"\nstep +1/", before)[0].splitlines()) <= 20, "what one reads before the first step"
    assert (
        after.index("model ")
        < after.index("evaluation loss ")
        < after.index("within the budget")
        < after.index("generate --model=")
    )
    assert (
        after.index("generate --model=") < after.index("details")
        and "reference" in screen
        and "generate --model=" in screen
    )
