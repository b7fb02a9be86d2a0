"""From text to a trained model: what a run writes, and that nothing but the settings decides its numbers."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest

from memory.estimate.time import RENEWED_STEPS
from tests.end_to_end.conftest import SAME, STEPS, World

LAUNCHER = {
    "accelerate": (sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"),
    "torchrun": (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"),
}
MODEL_FILES = {"config.json", "model.safetensors", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
# event -> fields that programs read
FIELDS = {
    "start": {"step", "run_name", "settings"},
    "plan": {"choice", "effective_batch_size", "budget_bytes", "peak_bytes", "components", "phases", "seconds"},
    "step": {
        "step", "loss", "learning_rate", "tokens", "seconds", "tokens_per_second", "batch_size_per_gpu",
        "gradient_accumulation_steps",
    },
    "memory": {
        "step", "phase", "anon_bytes", "file_bytes", "peak_bytes", "budget_bytes", "device_bytes", "device_peak_bytes",
    },
    "eval": {"step", "loss"},
    "cleanup": {"step", "kind", "freed_bytes"},
    "checkpoint": {"step", "path"},
    "sample": {"prompt", "answer", "reference"},
    "end": {"planned_peak_bytes", "measured_peak_bytes", "tokens_per_second", "best_eval_loss"},
}  # fmt: skip


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
    assert not [path for path in place.folder.rglob("*") if ".tmp" in path.name or path.name.endswith(".partial")]


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
    screen = (pretrained.place.folder / "screen.txt").read_text(encoding="utf8")
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
    screen = (pretrained.place.folder / "screen.txt").read_text("utf8")
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


@pytest.mark.parametrize(
    ("step", "number"),
    [
        pytest.param(8, signal.SIGINT, id="Ctrl-C"),
        pytest.param(2, signal.SIGKILL, id="killed before the first checkpoint", marks=pytest.mark.slow),
    ],
)
def test_a_stopped_run_goes_on_as_if_it_had_not(pretrained: World, tmp_path: Path, step: int, number: int) -> None:
    place = pretrained.beside(tmp_path)
    stopped = place.stop_at(step, number, "train", *pretrained.train_flags, "--run_name=cut")
    assert stopped.returncode == (-signal.SIGKILL if number == signal.SIGKILL else 130), stopped.stdout
    if number != signal.SIGKILL:
        reached = max(place.losses("cut"))
        assert f"stopped after step {reached}, saved in {place.runs / 'cut'}" in stopped.stdout
        assert (place.runs / "cut/checkpoints/latest").resolve().name == f"step_{reached:08}"
        (log,) = place.logs.glob("chat_trainer_low_mem_*_cut.log")
        assert f"| ended: stopped after step {reached}, saved in" in log.read_text("utf8")
    assert not (place.runs / "cut" / "config.json").exists(), "the run was not stopped in its middle"
    resumed = place.do("train", "--is_keep_training=True").stdout  # the run knows its own settings
    assert ("cut continues after step" in resumed) is (step > 2), "from a checkpoint"
    assert place.losses("cut") == pretrained.place.losses("whole"), "bit for bit"
    evaluations = [
        [event["loss"] for event in its.events(name) if event["event"] == "eval" and event["step"]]
        for its, name in ((place, "cut"), (pretrained.place, "whole"))
    ]
    assert evaluations[0] == evaluations[1]
    first = [place.events(name)[-1]["first_eval_loss"] for place, name in ((place, "cut"), (pretrained.place, "whole"))]
    assert first[0] == first[1] is not None, "the summary compares with the beginning of the run, not of its last part"
    again = place.do("train", "--is_keep_training=True").stdout
    assert f"{max(place.losses('cut'))}, all done before" in again and "of the run" not in again


@pytest.mark.parametrize("launcher", ["accelerate", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_two_processes_give_the_losses_of_one(pretrained: World, tmp_path: Path, launcher: str) -> None:
    """Seven rows: one process has three, the other four; and each row drops the same activations."""
    place = pretrained.beside(tmp_path)
    place.do("train", *pretrained.train_flags, "--run_name=two", launcher=LAUNCHER[launcher])
    assert pretrained.difference(place, "two") < SAME
    ends = [event for event in place.events("two") if event["event"] == "end"]
    assert len(ends) == 1 and len(list(place.logs.glob("chat_trainer_low_mem_*.log"))) == 1


def test_no_way_to_save_memory_changes_the_numbers(pretrained: World, tmp_path: Path) -> None:
    place = pretrained.beside(tmp_path)
    way = ("--batch_size_per_gpu=3", "--gradient_checkpointing=True", "--ultra_low_mem=True")
    place.do("train", *pretrained.train_flags, *way, "--run_name=way")
    assert pretrained.difference(place, "way") < SAME
    step = next(event for event in place.events("way") if event["event"] == "step")
    assert (step["batch_size_per_gpu"], step["gradient_accumulation_steps"]) == (3, 3), "of seven rows"


def test_what_does_not_fit_is_refused_before_anything_is_written(pretrained: World, tmp_path: Path) -> None:
    place = pretrained.beside(tmp_path)
    refused = place.run("train", *pretrained.train_flags, "--run_name=big", "--memory_budget=100M")
    assert refused.returncode == 3 and "Traceback" not in refused.stderr, refused.stderr
    assert "does not fit" in refused.stderr and "--memory_budget = 100.0 MiB" in refused.stderr
    assert re.search(r"--memory_budget=\d+M", refused.stderr), "says what would hold it"
    assert not place.runs.exists() and not place.logs.exists()
