"""Going on with a run: after a launcher's restart, from a folder of somebody else, and beside one that lives."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from settings.declared import Config
from settings.errors import UserError
from settings.fields import AUTO
from settings.loading import load
from training.checkpoints.run_lock import RunLock
from training.checkpoints.runs import create_run, note_attempt, run_of_attempt
from training.processes.group import Group
from training.report.run_files import SETTINGS_FILE
from training.setup.identify import Identity, claim_run, identify
from training.setup.resuming import resumed_config, unused_places


def saved_run(folder: Path, max_steps: int | None = None, **settings: Any) -> Path:
    """A run's folder as an earlier start has left it, which may have decided on its steps."""
    config = load("train", {"train_file": "a.txt", "output_dir": str(folder), "run_name": "r", **settings})
    config = config if max_steps is None else config.with_changes(max_steps=max_steps)
    return create_run(folder, "r", "pretrain", fill=lambda made: config.save(made / SETTINGS_FILE))


def now(folder: Path, **flags: Any) -> Config:
    return load("train", {"output_dir": str(folder), "run_name": "r", **flags})


def identified(config: Config) -> Identity:
    """The run that this start would train."""
    with ExitStack() as resources:
        return identify(config, resources, Group())


@pytest.mark.parametrize("flags", [{"overwrite": "True"}, {"is_keep_training": "False"}])
def test_a_restart_of_torchrun_continues_the_run_of_its_first_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: dict[str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    attempt = tmp_path / "torchelastic_x" / "none_y" / "attempt_0" / "0"
    attempt.mkdir(parents=True)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(attempt / "error.json"))
    run_dir = saved_run(tmp_path, overwrite="True")
    note_attempt(run_dir)
    create_run(tmp_path, "newer", "pretrain")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    resumed = identified(now(tmp_path, **flags)).config
    assert (resumed.run.run_name, resumed.train.is_keep_training, resumed.run.overwrite) == ("r", True, False)

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "torchelastic_z" / "none_y" / "a" / "0" / "e.json"))
    if flags == {"is_keep_training": "False"}:
        with pytest.raises(UserError, match="--run_name = r, exists"):
            identified(now(tmp_path, **flags))
    else:
        assert identified(now(tmp_path, **flags)).resumed_dir is None, "this is another launch"


def test_a_restart_takes_no_run_that_its_first_attempt_has_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first attempt has begun to replace a run and failed before the new one had a model: the old one is back."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "none_y" / "attempt_0" / "0" / "error.json"))
    (tmp_path / "none_y").mkdir()
    run_dir = saved_run(tmp_path)
    note_attempt(run_dir)
    assert run_of_attempt(tmp_path, "r") is None, "the first attempt may train several runs in turn"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert run_of_attempt(tmp_path, "r") == run_of_attempt(tmp_path, "auto") == "r"
    assert run_of_attempt(tmp_path, "other") is None
    record = json.loads((run_dir / "run.json").read_text())
    (run_dir / "run.json").write_text(json.dumps({**record, "started": 1.0}))
    assert run_of_attempt(tmp_path, "r") is None


@pytest.mark.parametrize("start", ["auto", "hf://google/flan-t5-small"])
def test_a_command_that_is_given_again_means_what_its_run_has_decided(tmp_path: Path, start: str) -> None:
    decided = {"is_finetune": "True", "head": "sequence", "finetune_from": "models/base", "class_weights": "1,2"}
    run_dir = saved_run(tmp_path, **decided)
    again = {**decided, "finetune_from": start, "class_weights": "balanced"}
    resumed = resumed_config(now(tmp_path, **again), run_dir)
    assert resumed.train.finetune_from == "models/base" and resumed.origin("finetune_from") != "flag"
    assert resumed.train.class_weights == "1,2"
    moved = resumed_config(now(tmp_path, finetune_from="elsewhere"), run_dir)
    assert moved.train.finetune_from == "elsewhere" and moved.origin("finetune_from") == "flag"


def test_places_are_those_of_who_resumes(tmp_path: Path) -> None:
    their_places = {
        "log_dir": "/theirs/logs",
        "weights_dir": "/theirs/weights",
        "cache_dir": "/theirs/cache",
        "seed": "7",
    }
    run_dir = saved_run(tmp_path / "runs", **their_places)
    saved = json.loads((run_dir / SETTINGS_FILE).read_text())
    (run_dir / SETTINGS_FILE).write_text(json.dumps({**saved, "output_dir": "/theirs/runs", "run_name": "../up"}))
    config = now(tmp_path / "runs", cache_dir="mine")
    resumed = resumed_config(config, run_dir)
    assert (resumed.run.output_dir, resumed.run.run_name) == (str(tmp_path / "runs"), "r")
    assert (resumed.run.log_dir, resumed.memory.weights_dir, resumed.data.cache_dir) == ("logs", AUTO, "mine")
    assert resumed.data.train_file == "a.txt" and resumed.run.seed == 7, "what defines the run is the run's"
    notes = unused_places(config.as_dict(), config.is_set, run_dir)
    assert len(notes) == 2 and "log_dir = logs" in notes[0] + notes[1] and "/theirs/weights" in notes[0] + notes[1]


def test_what_defines_a_run_stays_and_what_does_not_may_change(tmp_path: Path) -> None:
    run_dir = saved_run(tmp_path, effective_batch_size="6", max_target_len="30")
    defined = {"weight_decay": "0.01", "response_column": "answer", "is_finetune": "True", "d_ff": "8"}
    with pytest.raises(UserError) as caught:
        resumed_config(now(tmp_path, **defined), run_dir)
    assert {problem.split(" = ")[0].removeprefix("--") for problem in caught.value.problems} == set(defined)
    free = {"learning_rate": 0.5, "max_steps": 9, "batch_size_per_gpu": 1, "eval_rows": 7}
    flags = {"effective_batch_size": "auto", "max_target_len": "auto", **{name: str(free[name]) for name in free}}
    values = resumed_config(now(tmp_path, **flags), run_dir).as_dict()
    assert {name: values[name] for name in free} == free
    assert (values["effective_batch_size"], values["max_target_len"]) == (6, 30), "auto is what the run has"


@pytest.mark.skipif(os.name == "nt", reason="needs links")
def test_nothing_is_removed_behind_a_link(tmp_path: Path) -> None:
    """A folder from elsewhere may say that its checkpoints are those of another run."""
    run_dir = saved_run(tmp_path / "runs")
    (tmp_path / "mine" / ".tmp-step_00000001").mkdir(parents=True)
    (run_dir / "checkpoints").symlink_to(tmp_path / "mine")
    with RunLock() as lock, pytest.raises(UserError, match="checkpoints is a link"):
        claim_run(now(tmp_path / "runs", is_keep_training="True"), None, lock)
    assert (tmp_path / "mine" / ".tmp-step_00000001").is_dir()
