"""A mirror that several machines write to, or that others have damaged: one run copies there, from where it is furthest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pyarrow import fs

from config import load
from settings.errors import UserError
from tests.training.checkpoints.test_mirror import began, content, save
from training.checkpoints.folder import Checkpoints
from training.checkpoints.mirror import Mirror
from training.checkpoints.runs import RUN_FILE, SETTINGS_FILE
from training.start.resuming import goes_on


def test_two_runs_that_begin_together_do_not_replace_each_other(tmp_path: Path) -> None:
    uri, first, second = (tmp_path / "there").as_uri(), tmp_path / "a" / "r", tmp_path / "b" / "r"
    mirrors = [Mirror(uri, "r") for _ in range(2)]
    for mirror in mirrors:
        mirror.check()
    for step in (1, 2):
        for number, (mirror, run_dir) in enumerate(zip(mirrors, (first, second), strict=True)):
            checkpoint = save(run_dir, step, text=str(number))
            began(run_dir, float(number))
            told = mirror.push(run_dir, checkpoint)
            assert (told is None) == (number == 0)
    assert told is not None and "another run of this name copies there by now" in told
    restored = Mirror(uri, "r").restore(tmp_path / "c" / "r", 2)
    assert restored is not None and content(restored) == content(first / "checkpoints" / "step_00000002")


def test_a_machine_that_is_behind_removes_nothing(tmp_path: Path) -> None:
    uri, ahead, behind = (tmp_path / "there").as_uri(), tmp_path / "a" / "r", tmp_path / "b" / "r"
    mirror = Mirror(uri, "r")
    assert mirror.push(ahead, save(ahead, 5)) is None
    assert mirror.restore(behind, 2) is not None
    for step in (10, 15):
        assert mirror.push(ahead, save(ahead, step)) is None
    late = Mirror(uri, "r")
    late.check(behind)
    told = late.push(behind, save(behind, 7))
    assert told is not None and "step_00000015 of this run, which this machine lacks" in told
    assert (tmp_path / "there" / "r" / "LATEST").read_text() == "step_00000015"
    assert late.restore(behind, 2) == behind / "checkpoints" / "step_00000015"
    assert late.push(behind, save(behind, 20)) is None


def test_a_run_that_goes_on_before_a_damaged_copy_replaces_it(tmp_path: Path) -> None:
    uri, first, second = (tmp_path / "there").as_uri(), tmp_path / "a" / "r", tmp_path / "b" / "r"
    mirror = Mirror(uri, "r")
    for step in (5, 10):
        assert mirror.push(first, save(first, step, is_best=step == 5)) is None
    (tmp_path / "there" / "r" / "checkpoints" / "step_00000010" / "model.safetensors").write_text("damaged")
    assert mirror.restore(second, 2) is not None
    taken, _ = Checkpoints(second, 2).intact()
    assert taken == second / "checkpoints" / "step_00000005"
    assert mirror.push(second, save(second, 7)) is None
    restored = mirror.restore(tmp_path / "c" / "r", 2)
    assert restored is not None and restored.name == "step_00000007"


def test_what_another_process_removes_meanwhile_is_not_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mirror, here = Mirror((tmp_path / "there").as_uri(), "r"), tmp_path / "here"
    assert mirror.push(here, save(here, 1)) is None
    plain = fs.copy_files

    def robbed(source: str, target: str, *systems: object) -> None:
        plain(source, target, *systems)
        Path(target, "model.safetensors").unlink()

    with monkeypatch.context() as patch:
        patch.setattr("training.checkpoints.mirror.fs.copy_files", robbed)
        told = mirror.push(here, save(here, 2))
    assert mirror.lacks == 2
    assert told is not None and "another process removes what this one copies" in told
    assert mirror.restore(tmp_path / "new", 2) is not None
    assert mirror.push(here, save(here, 3)) is None


def test_copies_that_may_not_be_removed_are_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mirror, here = Mirror((tmp_path / "there").as_uri(), "r"), tmp_path / "here"

    def refused(*_: object) -> None:
        raise PermissionError("403")

    monkeypatch.setattr(mirror, "_forget", refused)
    told = mirror.push(here, save(here, 1))
    assert told is not None and "that the run has dropped could not be removed (403)" in told and mirror.lacks is None
    assert (tmp_path / "there" / "r" / "LATEST").read_text() == "step_00000001"


@pytest.mark.parametrize("file", [SETTINGS_FILE, RUN_FILE])
@pytest.mark.parametrize("text", ['{"step"', "[1]", "1" * 5000])
def test_damaged_settings_there_replace_none_and_begin_no_run(file: str, text: str, tmp_path: Path) -> None:
    mirror, here, new = Mirror((tmp_path / "there").as_uri(), "r"), tmp_path / "here" / "r", tmp_path / "new" / "r"
    older = tmp_path / "older" / "r"
    for step in (1, 2):
        checkpoint = save(here, step)
        began(here, 1.0)
        assert mirror.push(here, checkpoint) is None
        if step == 1:
            assert mirror.restore(older, 2) is not None
    before = (older / SETTINGS_FILE).read_bytes()
    (tmp_path / "there" / "r" / file).write_text(text)
    with pytest.raises(UserError, match=f"{file} is damaged"):
        mirror.restore(new, 2)
    assert not new.exists(), "nothing is taken for a run that has just begun"
    if file == SETTINGS_FILE:
        with pytest.raises(UserError, match="is damaged"):
            mirror.restore(older, 2)
    assert (older / SETTINGS_FILE).read_bytes() == before
    checkpoint = save(here, 3)
    began(here, 1.0)
    assert mirror.push(here, checkpoint) is None and mirror.restore(new, 2) is not None, "the next copy mends it"


def test_a_restore_that_breaks_off_leaves_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mirror, here, new = Mirror((tmp_path / "there").as_uri(), "r"), tmp_path / "here" / "r", tmp_path / "new" / "r"
    assert mirror.push(here, save(here, 1)) is None

    def cut(*_: object) -> None:
        raise OSError("cut")

    monkeypatch.setattr(mirror, "_bring", cut)
    with pytest.raises(UserError, match="cannot be restored"):
        mirror.restore(new, 2)
    assert not new.exists()


def test_a_run_without_a_name_is_brought_too(tmp_path: Path) -> None:
    uri, here, older = (tmp_path / "there").as_uri(), tmp_path / "here" / "r", tmp_path / "older" / "r"
    mirror = Mirror(uri, "r")
    for step in (1, 2):
        assert mirror.push(here, save(here, step)) is None
        if step == 1:
            mirror.restore(older, 2)
    for run_dir in (here, older):
        (run_dir / RUN_FILE).write_text(json.dumps({"name": "r", "kind": "pretrain", "started": 1.0}))
    (tmp_path / "there" / "r" / RUN_FILE).write_bytes((here / RUN_FILE).read_bytes())
    flags = {"is_keep_training": "True", "output_dir": str(older.parent), "checkpoint_mirror": uri}
    assert goes_on(load("train", {"train_file": "any", **flags}))
    assert Checkpoints(older, 2).latest() == older / "checkpoints" / "step_00000002"


def test_a_service_is_written_to_no_faster_than_it_takes() -> None:
    """Else Arrow queues a whole checkpoint in memory where the line is slow: 463 MiB were seen of a file of 400 MB."""
    mirror = Mirror("s3://key:secret@bucket/runs?endpoint_override=127.0.0.1%3A9&scheme=http&region=x", "r")
    _, (options, *_) = mirror._system.__reduce__()
    assert options["background_writes"] is False
    assert (options["access_key"], options["region"], options["endpoint_override"]) == ("key", "x", "127.0.0.1:9")


def test_the_place_of_the_run_itself_is_no_mirror(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    for name in ("runs", "link"):
        assert Mirror((tmp_path / name).as_uri(), "r").is_at(tmp_path / "runs" / "r")
    assert not Mirror((tmp_path / "there").as_uri(), "r").is_at(tmp_path / "runs" / "r")
