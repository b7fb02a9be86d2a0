"""Preferences: the command `dpo`, its settings and its shards."""

from __future__ import annotations

from pathlib import Path

import pytest

from data.task import shard_readers
from settings.declared import Config
from settings.errors import UserError
from settings.loading import load, training_command


def test_shards_of_preferences_are_read_by_this_task() -> None:
    assert shard_readers()["preferences"].name == "preferences"


def test_the_settings_of_a_run_are_loaded_again_by_dpo_alone(tmp_path: Path) -> None:
    first = load("dpo", {"train_file": "x", "preference_loss": "orpo", "beta": "0.3"})
    first.save(tmp_path / "config.json")
    again = load("dpo", {"config": str(tmp_path / "config.json")})
    assert again.as_dict() == first.as_dict() != Config().as_dict()
    assert training_command(first.as_dict()) == "dpo"
    with pytest.raises(UserError, match=r"^--objective = preferences"):
        load("train", {"config": str(tmp_path / "config.json")})


def test_what_contradicts_dpo_is_refused_at_once() -> None:
    flags = {"train_file": "x", "is_finetune": "True", "label_smoothing": "0.1", "preference_loss": "orpo"}
    with pytest.raises(UserError) as caught:
        load("dpo", flags)
    names = [problem.split(" = ")[0] for problem in caught.value.problems]
    assert names == ["--is_finetune", "--label_smoothing"]


def test_label_smoothing_has_no_effect_on_preferences() -> None:
    with pytest.raises(UserError, match=r"^--label_smoothing = "):
        load("dpo", {"label_smoothing": "0.1"})
    load("dpo", {"label_smoothing": "0"})
