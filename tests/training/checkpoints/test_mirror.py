"""Copies of checkpoints at an address: whole whenever the machine dies, and brought where there is none."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from run_files import RUN_FILE, SETTINGS_FILE
from settings.declared import Config
from settings.errors import UserError
from settings.loading import load
from tests.killing import DIED, die_at, run_child
from training.checkpoints.folder import Checkpoints
from training.checkpoints.mirror import Mirror
from training.checkpoints.runs import resume_run
from training.processes.launch import RESTARTS, launch_marks
from training.setup.resuming import goes_on


def save(run_dir: Path, step: int, keep: int = 2, is_best: bool = False, text: str = "", started: float = 1.0) -> Path:
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / SETTINGS_FILE).write_text(f'{{"step": {step}}}', encoding="utf8")
    record = {"kind": "pretrain", "name": run_dir.name, "started": started, "order": started}
    (run_dir / RUN_FILE).write_text(json.dumps(record), encoding="utf8")

    def write(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(bytes(1000) + f"{step}{text}".encode())
        (folder / "state").mkdir()
        (folder / "state" / "training.json").write_text(str(step), encoding="utf8")

    return Checkpoints(run_dir, keep).save(step, write, is_best)


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def pushed(tmp_path: Path) -> tuple[Mirror, Path]:
    """A mirror with the latest and the best of a run: steps 2 and 1."""
    mirror, here = Mirror((tmp_path / "there").as_uri(), "r"), tmp_path / "here" / "r"
    for step in (1, 2):
        assert mirror.push(here, save(here, step, is_best=step == 1)) is None
    return mirror, here


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.slow)])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A folder at a service: this machine's files, or a real S3 server."""
    if request.param == "file":
        return (tmp_path / "there").as_uri()
    return f"s3://bucket/{tmp_path.name}?{request.getfixturevalue('s3').query}"


def test_a_new_machine_gets_the_latest_checkpoint_and_the_best(address: str, tmp_path: Path) -> None:
    mirror, here, new = Mirror(address, "r"), tmp_path / "here" / "r", tmp_path / "new" / "r"
    mirror.check()
    assert mirror.restore(new, 2) is None and not new.exists(), "nothing has been copied yet"
    for step in (1, 2, 3, 4):
        assert mirror.push(here, save(here, step, is_best=step == 1)) is None
    restored, best = mirror.restore(new, 2), Checkpoints(here, 2).best()
    assert restored == new / "checkpoints" / "step_00000004" == Checkpoints(new, 2).latest() and best is not None
    assert content(restored) == content(here / "checkpoints" / "step_00000004")
    again = Checkpoints(new, 2).best()
    assert again is not None and content(again) == content(best)
    assert (new / SETTINGS_FILE).read_bytes() == (here / SETTINGS_FILE).read_bytes()
    assert mirror.restore(here, 2) is None, "this machine is up to date"
    for step in (5, 6, 7):
        assert mirror.push(new, save(new, step)) is None
    kept = os.stat(here / "checkpoints" / "step_00000001" / "model.safetensors").st_ino
    assert mirror.restore(here, 2) == here / "checkpoints" / "step_00000007", "this machine has become the older one"
    assert os.stat(here / "checkpoints" / "step_00000001" / "model.safetensors").st_ino == kept, "nor fetched again"


def test_the_mirror_forgets_what_the_run_has_removed_and_nothing_else(tmp_path: Path) -> None:
    there = tmp_path / "there" / "r" / "checkpoints"
    for name in ("mine", "step_x", "step_00000001.bak"):
        (there / name).mkdir(parents=True)
    mirror, here = Mirror((tmp_path / "there").as_uri(), "r"), tmp_path / "here"
    for step in (1, 2, 3):
        assert mirror.push(here, save(here, step, keep=1)) is None
    assert sorted(path.name for path in there.iterdir()) == ["mine", "step_00000001.bak", "step_00000003", "step_x"]
    assert (there.parent / "LATEST").read_text() == "step_00000003"


@pytest.mark.parametrize("word", ["step_00000001\nstep_00000001/../..", "\xff"])
def test_names_at_the_address_lead_nowhere_else(tmp_path: Path, pushed: tuple[Mirror, Path], word: str) -> None:
    mirror, here = pushed
    (tmp_path / "there" / "r" / "LATEST").write_text(word, encoding="latin1")
    with pytest.raises(UserError, match="LATEST holds"):
        mirror.restore(tmp_path / "new" / "r", 2)
    assert not (tmp_path / "new" / "r").exists()
    assert mirror.push(here, save(here, 3)) is None, "one's own run continues"


def test_a_damaged_latest_copy_leaves_the_best(tmp_path: Path, pushed: tuple[Mirror, Path]) -> None:
    mirror, new = pushed[0], tmp_path / "new" / "r"
    for number in (2, 1):
        path = tmp_path / "there" / "r" / "checkpoints" / f"step_0000000{number}" / "model.safetensors"
        path.write_bytes(b"cut")
        if number == 2:
            mirror.restore(new, 2)
            found, told = Checkpoints(new, 2).intact()
            assert found == new / "checkpoints" / "step_00000001" and "from step 1" in told[0]
    with pytest.raises(UserError, match="damaged"):
        mirror.restore(tmp_path / "newer", 2)
    assert not (tmp_path / "newer").exists()


def test_another_run_of_the_name_is_not_replaced_unasked(tmp_path: Path, pushed: tuple[Mirror, Path]) -> None:
    mirror, first = pushed
    second, there = tmp_path / "b" / "r", tmp_path / "there" / "r"
    mirror.check(first)
    checkpoint = save(second, 1, started=2.0)
    for run_dir in (None, second):
        with pytest.raises(UserError, match="another run named r"):
            mirror.check(run_dir)
    assert mirror.restore(second, 2) is None, "a run that began here is not continued from another's copies"
    mirror.check(second, overwrite=True)
    assert mirror.push(second, checkpoint) is None
    assert (there / "LATEST").read_text() == "step_00000001", "the best of the other run is none of this one"
    assert [path.name for path in (there / "checkpoints").iterdir()] == ["step_00000001"]
    restored = mirror.restore(tmp_path / "c" / "r", 2)
    assert restored is not None and content(restored) == content(checkpoint)


def test_two_runs_that_begin_together_do_not_replace_each_other(tmp_path: Path) -> None:
    uri, first, second = (tmp_path / "there").as_uri(), tmp_path / "a" / "r", tmp_path / "b" / "r"
    mirrors = [Mirror(uri, "r") for _ in range(2)]
    for mirror in mirrors:
        mirror.check()
    assert mirrors[0].push(first, save(first, 1, started=1.0)) is None
    told = mirrors[1].push(second, save(second, 1, started=2.0))
    assert told is not None and "another run of this name" in told and mirrors[1].uncopied_step == 1
    restored = Mirror(uri, "r").restore(tmp_path / "c" / "r", 2)
    assert restored is not None and content(restored) == content(first / "checkpoints" / "step_00000001")


@pytest.mark.skipif(os.name == "nt", reason="os.fork")
def test_a_kill_at_every_single_change_of_the_mirror(tmp_path: Path) -> None:
    """Copies 1 (the best) and 2; dies while copying 3. A new machine finds 2 or 3 and the best, and the next copy is as ever."""
    begun = tmp_path / "begun"
    for step in (1, 2, 3):
        saved = save(begun / "here" / "r", step, keep=1, is_best=step != 2)
        assert step == 3 or Mirror((begun / "there").as_uri(), "r").push(begun / "here" / "r", saved) is None
    for number in range(1000):
        folder = shutil.copytree(begun, tmp_path / str(number), symlinks=True)
        here, uri = folder / "here" / "r", (folder / "there").as_uri()
        third = here / saved.relative_to(begun / "here" / "r")

        def push(here: Path = here, uri: str = uri, third: Path = third, number: int = number) -> None:
            die_at(number, True, is_mirror=True)
            assert Mirror(uri, "r").push(here, third) is None

        code = run_child(push)
        for new in ("new", "newer"):
            restored = Mirror(uri, "r").restore(folder / new / "r", 1)
            found, best = Checkpoints(folder / new / "r", 1), Checkpoints(folder / new / "r", 1).best()
            assert restored is not None and found.intact() == (restored, []) and best is not None
            last = int(restored.name[-1])
            assert last in ((3,) if new == "newer" else (2, 3)) and best.name[-1] == ("3" if last == 3 else "1")
            assert Mirror(uri, "r").push(here, third) is None
        if code == 0:
            break
        assert code == DIED
    assert number > 20, "every change was a moment of its own"


def test_a_place_that_is_gone_is_not_made_anew(tmp_path: Path) -> None:
    mirror, here = Mirror((tmp_path / "there").as_uri(), "r"), tmp_path / "here"
    mirror.check()
    os.replace(tmp_path / "there", tmp_path / "unmounted")
    told = mirror.push(here, save(here, 1))
    assert told is not None and "is no longer there" in told and not (tmp_path / "there").exists()


def test_a_failed_copy_is_told_and_leaves_the_one_before(
    tmp_path: Path, pushed: tuple[Mirror, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror, here = pushed

    def fail(*args: object) -> None:
        raise OSError("the network is gone")

    with monkeypatch.context() as patch:
        patch.setattr("training.checkpoints.mirror.fs.copy_files", fail)
        told = mirror.push(here, save(here, 3))
    assert told is not None and "the network is gone" in told and mirror.uncopied_step == 3
    restored = mirror.restore(tmp_path / "new", 2)
    assert restored is not None and restored.name == "step_00000002"


def test_wrong_addresses_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="checkpoint_mirror"):
        Mirror("nowhere://x", "r")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        Mirror((tmp_path / "file").as_uri(), "r").check()
    with pytest.raises(UserError) as caught:
        Mirror("s3://KEY:sec/ret@bucket/my folder", "r")
    assert "ret" not in str(caught.value) and "%20" in str(caught.value)
    with pytest.raises(UserError, match="checkpoint_mirror"):
        load("train", {"checkpoint_mirror": "folder"})


def test_damaged_settings_there_begin_no_run(tmp_path: Path, pushed: tuple[Mirror, Path]) -> None:
    mirror, _ = pushed
    (tmp_path / "there" / "r" / SETTINGS_FILE).write_text("[1]")
    with pytest.raises(UserError, match=f"{SETTINGS_FILE} is damaged"):
        mirror.restore(tmp_path / "new" / "r", 2)
    assert not (tmp_path / "new" / "r").exists()


def config_of(tmp_path: Path, **flags: str) -> Config:
    return load("train", {"output_dir": str(tmp_path / "runs"), **flags})


@pytest.mark.parametrize(
    ("asked", "exists", "restarts", "expected"),
    [
        ("False", True, "0", False), ("auto", False, "0", False), ("auto", True, "0", True), ("True", False, "0", True),
        ("False", True, "2", True), ("False", False, "2", False),
    ],
)  # fmt: skip
def test_the_same_command_goes_on_with_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str, exists: bool, restarts: str, expected: bool
) -> None:
    monkeypatch.setenv(RESTARTS, restarts)
    if exists:
        resume_run(save(tmp_path / "runs" / "r", 1).parents[1], launch=launch_marks())
    assert goes_on(config_of(tmp_path, run_name="r", is_keep_training=asked)) is expected


def test_a_run_is_found_again_at_its_mirror(tmp_path: Path, pushed: tuple[Mirror, Path]) -> None:
    uri = (tmp_path / "there").as_uri()
    assert goes_on(config_of(tmp_path, run_name="r", is_keep_training="auto", checkpoint_mirror=uri))
    assert Checkpoints(tmp_path / "runs" / "r", 2).latest() is not None
    assert pushed[0].push(pushed[1], save(pushed[1], 3)) is None
    assert goes_on(config_of(tmp_path, is_keep_training="True", checkpoint_mirror=uri)), "a run without a name, too"
    assert Checkpoints(tmp_path / "runs" / "r", 2).latest() == tmp_path / "runs" / "r" / "checkpoints" / "step_00000003"
