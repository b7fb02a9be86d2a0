"""Several processes, resumed in another number: the losses are those of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.running import ENVIRONMENT, ROOT
from tests.end_to_end.world import SAME, STEPS, World
from tests.ranks import must_succeed

slow = pytest.mark.slow


def launcher(count: int) -> tuple[str, ...]:
    if count == 1:
        return (sys.executable,)
    return (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(count))


def test_the_same_flags_train_the_same_model_on_two_processes(world: World, tmp_path: Path) -> None:
    """Though nobody has said how many rows a step has."""
    flags = [flag for flag in world.train_flags if not flag.startswith(("--effective_batch_size", "--max_steps"))]
    flags += ["--max_steps=3", "--sample_rows=0", "--log_steps=1", "--gradient_accumulation_steps=2"]
    place = world.beside(tmp_path)
    place.do("train", *flags, "--run_name=one")
    must_succeed(ROOT / "train_low_mem.py", 2, *place.command("train", *flags, "--run_name=two")[1:])
    assert place.losses("two") == pytest.approx(place.losses("one"), rel=SAME)
    one, two = (next(event for event in place.events(name) if event["event"] == "plan") for name in ("one", "two"))
    assert two["effective_batch_size"] == one["effective_batch_size"]
    assert two["choice"]["batch_size_per_gpu"] == one["choice"]["batch_size_per_gpu"] // 2
    saved = json.loads((place.runs / "two" / "settings.json").read_text("utf8"))
    assert saved["effective_batch_size"] == one["effective_batch_size"], "a run that goes on keeps it"


@slow
@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_torchrun_restarts_the_run_of_its_first_attempt_and_none_that_was_asked_to_stop(
    pretrained: World, tmp_path: Path
) -> None:
    """Though the run has no name: its first attempt gives it one."""
    place = pretrained.beside(tmp_path)
    script = Path(__file__).parent / "children" / "restarted_child.py"
    words = place.command("train", *pretrained.train_flags, "--save_steps=4", "--log_steps=1")[1:]
    torchrun = (*launcher(2), "--max_restarts=3", str(script))
    environment = {**ENVIRONMENT, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = subprocess.run(
        [*torchrun, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = place.runs.glob("pretrain_*")
    starts = [event["step"] for event in place.events(run.name) if event["event"] == "start"]
    assert len(starts) == 2 and starts[0] == 0 < starts[1] < 9, "torchrun starts nothing after the stop"
    assert done.stderr.count("another process of this run is gone") == 1, done.stderr
    assert done.stderr.count("stopped after step") == 1, done.stderr
    losses = place.losses(run.name)
    assert losses == pytest.approx({step: pretrained.place.losses("whole")[step] for step in losses}, rel=SAME)
    assert max(losses) < STEPS


@slow
def test_out_of_memory_on_one_process_changes_no_losses(pretrained: World, tmp_path: Path) -> None:
    """All processes stop at the same block, go back together where blocks were updated, and run the same rows again."""
    place = pretrained.beside(tmp_path)
    script = Path(__file__).parent / "children" / "out_of_memory_child.py"
    flags = (*pretrained.train_flags, "--run_name=short", "--weights_in=file")
    command = [*launcher(2), str(script), *place.command("train", *flags)[1:]]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "weights were changed already" in done.stdout
    assert pretrained.difference(place, "short") < SAME


def test_what_is_not_finite_on_one_process_is_left_out_by_all(pretrained: World, tmp_path: Path) -> None:
    place = pretrained.beside(tmp_path)
    script = Path(__file__).parent / "children" / "not_finite_child.py"
    flags = (*pretrained.train_flags, "--eval_steps=24", "--sample_rows=0", "--run_name=left_out")
    words = place.command("train", *flags)
    must_succeed(script, 2, *words[1:])
    assert list(place.losses("left_out")) == list(range(1, 25))
    records = [(event["reason"], event["step"]) for event in place.events("left_out") if event["event"] == "recovery"]
    assert records == [("not finite", 5), ("rolled back", 0), ("not finite", 4)]
    ours, theirs = place.losses("left_out"), pretrained.place.losses("whole")
    assert [ours[step] for step in range(1, 4)] == pytest.approx([theirs[step] for step in range(1, 4)], rel=1e-5)
    assert place.events("left_out")[-1]["skipped_batches"] == 2
