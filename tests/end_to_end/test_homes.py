"""A run whose weights rest in a file: the losses of weights in memory, also after a kill, and nothing is left behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.end_to_end.conftest import STEPS, World

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals")


def leftovers(folder: Path) -> list[Path]:
    return list(folder.rglob(".weights-*"))


@pytest.mark.parametrize("step", [13, *(pytest.param(step, marks=pytest.mark.slow) for step in (1, 2, 11, STEPS - 1))])
def test_a_kill_costs_nothing_but_the_steps_since_the_last_checkpoint(
    step: int, pretrained: World, tmp_path: Path
) -> None:
    place, flags = pretrained.beside(tmp_path), (*pretrained.train_flags, "--run_name=cut", "--weights_in=file")
    place.stop_at(step, signal.SIGKILL, "train", *flags)
    assert not leftovers(tmp_path), "the system frees the file with the process"
    done = place.do("train", "--is_keep_training=True", "--run_name=cut", "--weights_in=file")
    assert "rest in a file" in " ".join(done.stdout.split())
    assert place.losses("cut") == pretrained.place.losses("whole"), "those of weights in memory"
    one, other = (
        runs / name / "model.safetensors" for runs, name in ((place.runs, "cut"), (pretrained.place.runs, "whole"))
    )
    assert one.read_bytes() == other.read_bytes()


def test_a_run_may_go_on_with_its_weights_elsewhere(pretrained: World, tmp_path: Path) -> None:
    place, flags = pretrained.beside(tmp_path), (*pretrained.train_flags, "--run_name=cut", "--weights_in=file")
    place.stop_at(13, signal.SIGKILL, "train", *flags)
    place.do("train", "--is_keep_training=True", "--run_name=cut", "--weights_in=device")
    assert place.losses("cut") == pretrained.place.losses("whole")


def test_answers_and_evaluations_are_those_of_memory(pretrained: World, tmp_path: Path) -> None:
    place, model = pretrained.beside(tmp_path), pretrained.place.runs / "whole"
    asked = (f"--model={model}", "--input=the river runs", "--max_new_tokens=6", "--min_new_tokens=6")
    answers = {place.do("generate", *asked, f"--weights_in={home}").stdout for home in ("device", "file")}
    assert len(answers) == 1 and not leftovers(tmp_path)
