"""From preferences to a model: what a run writes, what does not change its numbers, and what it refuses."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from pathlib import Path

import pytest

from tests.end_to_end.conftest import World
from tests.end_to_end.running import WORDS, Place

STEPS = 12
LAUNCHER = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2")
# 1e-3: with Adafactor, the noise of a sum in another order is as large a step as any where a gradient is nothing else
TOLERANCE = 1e-3
FIGURES = {
    "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen", "logps/rejected",
}  # fmt: skip


def write_preferences(path: Path, rows: int = 150) -> Path:
    """The better answer says yes, the worse one no."""
    with path.open("w", encoding="utf8") as file:
        for number in range(rows):
            word = WORDS[number % len(WORDS)]
            row = {"prompt": f"is {word} {number}?", "chosen": f"yes, {word}", "rejected": f"no, not {word} at all"}
            file.write(json.dumps(row) + "\n")
    return path


@pytest.fixture(scope="module")
def tuned(pretrained: World, tmp_path_factory: pytest.TempPathFactory) -> World:
    """One preference run on the pretrained model, that nothing has disturbed."""
    folder = tmp_path_factory.mktemp("preferences")
    place = Place(folder, pretrained.place.cache)
    shutil.copytree(pretrained.place.runs / "whole", place.runs / "base")
    here = World(place, write_preferences(folder / "preferences.jsonl"), pretrained.pairs)
    place.do("dpo", *flags(here), "--run_name=whole")
    return here


def flags(tuned: World) -> tuple[str, ...]:
    return (
        f"--train_file={tuned.text}", f"--finetune_from={tuned.place.runs / 'base'}", "--max_seq_len=64", f"--max_steps={STEPS}",
        "--effective_batch_size=7", "--save_steps=5", "--eval_steps=6", "--mixed_precision=no", "--learning_rate=1e-2",
        "--beta=0.5", "--sample_rows=1", "--eval_rows=16",
    )  # fmt: skip


def difference(place: Place, name: str, tuned: World) -> float:
    ours, theirs = place.losses(name), tuned.place.losses("whole")
    assert ours.keys() == theirs.keys()
    return max(abs(ours[step] - theirs[step]) for step in ours)


def test_a_run_learns_what_is_preferred_and_tells_of_it(tuned: World) -> None:
    events = tuned.place.events("whole")
    steps = [event for event in events if event["event"] == "step"]
    evaluations = [event for event in events if event["event"] == "eval"]
    assert all(set(event) > FIGURES for event in (*steps, *evaluations))
    assert steps[0]["loss"] == pytest.approx(0.6931, abs=1e-3), "the model begins as its own reference"
    assert evaluations[0]["rewards/accuracies"] == steps[0]["rewards/accuracies"] == 0.5, "all pairs are ties"
    assert evaluations[-1]["loss"] < 0.6 and evaluations[-1]["rewards/accuracies"] == 1.0
    for event in steps:
        margin = event["rewards/chosen"] - event["rewards/rejected"]
        assert event["rewards/margins"] == pytest.approx(margin, abs=1e-9)
    about = json.loads((tuned.place.runs / "whole" / "run.json").read_text())
    assert about["kind"] == "dpo"
    assert (tuned.place.runs / "whole" / "model.safetensors").is_file()
    answer = tuned.place.do(
        "generate", f"--model={tuned.place.runs / 'whole'}", "--input=is rain 3?", "--max_new_tokens=3"
    )
    assert answer.stdout.endswith("\n")
    measured = tuned.place.do("evaluate", f"--model={tuned.place.runs / 'whole'}")
    assert "perplexity" in measured.stdout, "of the answers that were chosen"


def test_a_stopped_run_goes_on_as_if_it_had_not(tuned: World, tmp_path: Path) -> None:
    """It finds its reference although its own weights have moved."""
    place = tuned.beside(tmp_path)
    place.stop_at(7, signal.SIGKILL, "dpo", *flags(tuned), "--run_name=cut")
    assert max(place.losses("cut")) < STEPS
    place.do("dpo", "--is_keep_training=True")
    assert place.losses("cut") == tuned.place.losses("whole"), "bit for bit"
    name = "generation_config.json"  # as long as its base answers, which its own rows need not say
    assert (place.runs / "cut" / name).read_text() == (tuned.place.runs / "whole" / name).read_text()


@pytest.mark.slow
def test_two_processes_and_micro_batches_give_the_losses_of_one(tuned: World, tmp_path: Path) -> None:
    place = Place(tmp_path, tmp_path / "cache")  # an empty cache: the reference is computed by both
    place.do(
        "dpo",
        *flags(tuned),
        "--run_name=two",
        "--batch_size_per_gpu=2",
        "--gradient_checkpointing=True",
        launcher=LAUNCHER,
    )
    assert difference(place, "two", tuned) < TOLERANCE
    assert len(list((tmp_path / "cache").glob("reference-*/*.npy"))) == 2
