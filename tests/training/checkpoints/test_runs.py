"""Runs: refused before anything is created, found again by kind and time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from settings.errors import UserError
from support.storage import write_text
from training.checkpoints.folder import Checkpoints
from training.checkpoints.run_lock import RunLock
from training.checkpoints.runs import (
    create_run,
    delete_replaced_run,
    model_folder,
    only_pretrained,
    publish,
    read_run,
    restore_replaced_run,
    resume_run,
    runs_newest_first,
)


def write_model(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text(folder.name)
    (folder / "state").mkdir()


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the clock is a second later."""
    seconds = iter(range(1_000, 10_000))
    monkeypatch.setattr("time.time", lambda: float(next(seconds)))


@pytest.mark.usefixtures("ticking")
def test_newest_run_by_kind(tmp_path: Path) -> None:
    assert runs_newest_first(tmp_path / "missing") == []
    for name, kind in [("z", "pretrain"), ("a", "pretrain"), ("m", "finetune")]:
        create_run(tmp_path, name, kind)
    (tmp_path / "stranger").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.json").write_text("{")
    assert [(run.folder.name, run.kind) for run in runs_newest_first(tmp_path)] == [
        ("m", "finetune"),
        ("a", "pretrain"),
        ("z", "pretrain"),
    ]
    resume_run(tmp_path / "z")
    assert [run.folder.name for run in runs_newest_first(tmp_path)] == ["z", "m", "a"]
    record = read_run(tmp_path / "z")
    assert record is not None and record["name"] == "z" and record["started"] < record["resumed"]


def test_a_clock_that_is_set_back_does_not_change_which_run_is_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, clock in (("first", 5_000.0), ("second", 1_000.0), ("third", 999.0)):
        monkeypatch.setattr("time.time", lambda clock=clock: clock)
        run_dir = create_run(tmp_path, name, "pretrain")
        assert runs_newest_first(tmp_path)[0].folder == run_dir
    resume_run(tmp_path / "first")
    assert runs_newest_first(tmp_path)[0].folder == tmp_path / "first"


@pytest.mark.parametrize(("name", "problem"), [("..", "not a valid folder name"), ("thesis", "not a run of this")])
def test_only_runs_are_made_and_overwritten(tmp_path: Path, name: str, problem: str) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").write_text("years of work")
    with pytest.raises(UserError, match=problem):
        create_run(tmp_path, name, "pretrain", overwrite=True)
    assert [path.name for path in tmp_path.rglob("*")] == ["thesis", "chapter"]
    (tmp_path / "empty").mkdir()
    assert create_run(tmp_path, "empty", "pretrain") == tmp_path / "empty"


def test_a_best_checkpoint_that_somebody_has_removed_is_not_replaced_in_silence(tmp_path: Path) -> None:
    run_dir = create_run(tmp_path, "run", "pretrain")
    checkpoints = Checkpoints(run_dir, keep_latest=1)
    best = checkpoints.save(1, write_model, is_best=True)
    checkpoints.save(2, write_model)
    best.rename(tmp_path / "elsewhere")
    assert checkpoints.named_best() == best
    with pytest.raises(UserError, match=r"step_00000001 is no longer there[\s\S]*not published"):
        publish(best, run_dir)


def test_the_model_of_a_run_is_its_own_or_else_its_best_checkpoint(tmp_path: Path) -> None:
    run_dir = create_run(tmp_path, "run", "pretrain", objective="span")
    (run,) = runs_newest_first(tmp_path)
    assert model_folder(run_dir) is None and run.is_of_text and not run.is_finished
    checkpoints = Checkpoints(run_dir, keep_latest=2)
    latest = checkpoints.save(1, write_model)
    assert model_folder(run_dir) == latest
    best = checkpoints.save(2, write_model, is_best=True)
    latest = checkpoints.save(3, write_model)
    assert run.model_folder == best and not run.is_finished
    publish(latest, run_dir)
    assert model_folder(run_dir) == run_dir and run.is_finished
    assert (run_dir / "model.safetensors").samefile(latest / "model.safetensors")
    assert not (run_dir / "state").exists()
    assert only_pretrained(latest) and only_pretrained(run_dir) and not only_pretrained(tmp_path)
    assert not only_pretrained(create_run(tmp_path, "tuned", "finetune", objective="pairs"))


def test_a_run_that_is_replaced_lies_beside_until_the_new_model_stands(tmp_path: Path) -> None:
    def start(word: str) -> Path:
        return create_run(
            tmp_path, "run", "pretrain", overwrite=True, fill=lambda folder: (folder / "said").write_text(word)
        )

    run_dir = start("old")
    restore_replaced_run(run_dir)
    assert (run_dir / "said").read_text() == "old", "it has replaced none"
    start("killed")
    start("fails")
    restore_replaced_run(run_dir)
    assert (run_dir / "said").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    delete_replaced_run(start("new"))
    restore_replaced_run(run_dir)
    assert (run_dir / "said").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.skipif(os.name == "nt", reason="needs links")
def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    """A folder from elsewhere may hold links under the names that a resume writes."""
    (tmp_path / "mine").write_text("mine")
    run_dir = create_run(tmp_path / "runs", "run", "pretrain")
    for name in (".tmp-run.json", "settings.json", ".tmp-settings.json", "owner.json", ".tmp-owner.json"):
        (run_dir / name).symlink_to(tmp_path / "mine")
    resume_run(run_dir)
    write_text(run_dir / "settings.json", "{}")
    with RunLock() as lock:
        assert lock.acquire(run_dir) == []
        lock.write_owner()
        assert "process" in (run_dir / "owner.json").read_text()
    assert (tmp_path / "mine").read_text() == "mine"
    assert not (run_dir / "settings.json").is_symlink()
