"""Copies of checkpoints at an address: whole whenever the machine dies, and brought where there is none."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from pyarrow import fs

from config import Config, load
from settings.errors import UserError
from tests.killing import DIED, die_at, run_child
from training.checkpoints.folder import Checkpoints
from training.checkpoints.mirror import Mirror
from training.checkpoints.runs import RUN_FILE, SETTINGS_FILE, resume_run
from training.processes.launch import RESTARTS, launch_marks
from training.start.resuming import goes_on


def save(run_dir: Path, step: int, keep: int = 2, is_best: bool = False, text: str = "") -> Path:
    run_dir.mkdir(parents=True, exist_ok=True)
    for name in (SETTINGS_FILE, RUN_FILE):
        (run_dir / name).write_text(f'{{"step": {step}}}', encoding="utf8")

    def write(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(bytes(1000) + f"{step}{text}".encode())
        (folder / "state").mkdir()
        (folder / "state" / "training.json").write_text(str(step), encoding="utf8")

    return Checkpoints(run_dir, keep).save(step, write, is_best)


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.slow)])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A folder at a service: this machine's files, or a real S3 server."""
    if request.param == "file":
        return (tmp_path / "there").as_uri()
    return f"s3://bucket/{tmp_path.name}?{request.getfixturevalue('s3').query}"


def test_a_new_machine_gets_the_latest_checkpoint(address: str, tmp_path: Path) -> None:
    mirror, here, new = Mirror(address, "r"), tmp_path / "here" / "r", tmp_path / "new" / "r"
    mirror.check()
    assert mirror.restore(new, 2) is None and not new.exists(), "nothing has been copied yet"
    for step in (5, 10, 15):
        assert mirror.push(here, save(here, step)) is None
    restored = mirror.restore(new, 2)
    assert restored is not None and restored.name == "step_00000015"
    assert content(restored) == content(here / "checkpoints" / "step_00000015")
    assert Checkpoints(new, 2).latest() == restored
    assert (new / SETTINGS_FILE).read_bytes() == (here / SETTINGS_FILE).read_bytes()
    assert mirror.restore(here, 2) is None, "this machine is up to date"
    older = tmp_path / "older" / "r"
    save(older, 10)
    assert (
        mirror.restore(older, 2) is not None and Checkpoints(older, 2).latest() == older / "checkpoints/step_00000015"
    )


def test_the_mirror_forgets_what_the_run_has_dropped(tmp_path: Path) -> None:
    there = tmp_path / "there"
    mirror, here = Mirror(there.as_uri(), "r"), tmp_path / "here"
    for step in (1, 2, 3, 4):
        mirror.push(here, save(here, step))
    assert sorted(path.name for path in (there / "r" / "checkpoints").iterdir()) == ["step_00000003", "step_00000004"]
    assert (there / "r" / "LATEST").read_text() == "step_00000004"


def test_the_best_comes_back_and_stays_there(address: str, tmp_path: Path) -> None:
    """What a new machine brings is the latest and the best; its next copies do not remove the best there."""
    mirror, here, new = Mirror(address, "r"), tmp_path / "here" / "r", tmp_path / "new" / "r"
    for step in (1, 2, 3, 4):
        assert mirror.push(here, save(here, step, is_best=step == 1)) is None
    best = Checkpoints(here, 2).best()
    assert best is not None and best.name == "step_00000001"
    assert mirror.restore(new, 2) == new / "checkpoints" / "step_00000004"
    again = Checkpoints(new, 2).best()
    assert again is not None and content(again) == content(best)
    assert (new / "checkpoints" / "best").resolve() == again.resolve()
    for step in (5, 6, 7):
        assert mirror.push(new, save(new, step)) is None
    third = tmp_path / "third" / "r"
    assert mirror.restore(third, 2) == third / "checkpoints" / "step_00000007"
    assert Checkpoints(third, 2).best() == third / "checkpoints" / "step_00000001"


def test_the_same_step_again_writes_over_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = tmp_path / "there"
    mirror, here = Mirror(there.as_uri(), "r"), tmp_path / "here"
    mirror.push(here, save(here, 1))
    mirror.push(here, here / "checkpoints" / "step_00000001")
    assert [path.name for path in (there / "r" / "checkpoints").iterdir()] == ["step_00000001"], "nothing new"
    before = content(there / "r" / "checkpoints" / "step_00000001")
    again = save(here, 1, text="again")

    def die(source: str, target: str, *systems: object) -> None:
        Path(target, "model.safetensors").write_text("half")
        raise OSError("the machine is gone")

    with monkeypatch.context() as patch:
        patch.setattr("training.checkpoints.mirror.fs.copy_files", die)
        assert mirror.push(here, again) is not None
    assert content(there / "r" / "checkpoints" / "step_00000001") == before
    first = mirror.restore(tmp_path / "new", 2)
    assert first is not None and (first / "model.safetensors").read_bytes().endswith(b"\x001")
    assert mirror.push(here, again) is None
    assert [path.name for path in (there / "r" / "checkpoints").iterdir()] == ["step_00000001.3"]
    second = mirror.restore(tmp_path / "newer", 2)
    assert second is not None and second.name == "step_00000001" and content(second) == content(again)


NAMES = ["step_00000099/../../..", "../../x", "/etc", "..", "", "step_00000001\nstep_00000001/../..", "step_1", "\xff"]


@pytest.mark.parametrize("word", NAMES)
def test_names_at_the_address_lead_nowhere_else(tmp_path: Path, word: str) -> None:
    there, mine = tmp_path / "there", tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis").write_text("years of work")
    mirror = Mirror(there.as_uri(), "r")
    mirror.push(tmp_path / "here", save(tmp_path / "here", 1))
    (there / "r" / "LATEST").write_text(word, encoding="latin1")
    run_dir = mine / "runs" / "r"
    with pytest.raises(UserError, match=r"LATEST holds .* which no run writes"):
        mirror.restore(run_dir, 2)
    assert (mine / "thesis").is_file() and not run_dir.exists()
    assert mirror.push(tmp_path / "here", save(tmp_path / "here", 2)) is None, "one's own run continues"


def test_keys_at_the_address_lead_nowhere_else(tmp_path: Path) -> None:
    """An object store takes `..` as a part of a name like any other."""
    mirror = Mirror((tmp_path / "there").as_uri(), "r")
    mirror.push(tmp_path / "here", save(tmp_path / "here", 1))
    plain = mirror._system

    class Listing:
        def __getattr__(self, name: str) -> object:
            return getattr(plain, name)

        def get_file_info(self, what: object) -> object:
            found = plain.get_file_info(what)
            if not isinstance(found, list) or not found:
                return found
            bad = f"{mirror._path}/checkpoints/step_00000001/../../../../mine"
            return [*found, SimpleNamespace(path=bad, type=fs.FileType.File, base_name="mine", size=1)]

    mirror._system = Listing()
    with pytest.raises(UserError, match="which no run writes"):
        mirror.restore(tmp_path / "new" / "r", 2)
    assert not (tmp_path / "mine").exists() and Checkpoints(tmp_path / "new" / "r", 2).latest() is None


def test_what_is_not_ours_there_is_left_alone(tmp_path: Path) -> None:
    there = tmp_path / "there" / "r" / "checkpoints"
    for name in ("mine", "step_x", "step_00000001.bak"):
        (there / name).mkdir(parents=True)
    mirror, here = Mirror((tmp_path / "there").as_uri(), "r"), tmp_path / "here"
    for step in (1, 2, 3):
        assert mirror.push(here, save(here, step, keep=1)) is None
    assert sorted(path.name for path in there.iterdir()) == ["mine", "step_00000001.bak", "step_00000003", "step_x"]


def test_a_damaged_copy_is_refused_and_a_damaged_run_is_mended(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    mirror = Mirror(there.as_uri(), "r")
    mirror.push(here, save(here, 1))
    (here / "checkpoints" / "step_00000001" / "model.safetensors").write_bytes(b"cut")
    restored = mirror.restore(here, 2)
    assert restored is not None and Checkpoints(here, 2).intact() == (restored, [])
    newer = save(here, 2) / "model.safetensors"
    newer.write_bytes(b"cut")
    assert mirror.restore(here, 2) is None
    assert "model.safetensors is damaged" in Checkpoints(here, 2).intact()[1][0], "told on resuming, not lost here"
    (there / "r" / "checkpoints" / "step_00000001" / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(UserError, match="the copy step_00000001 is damaged"):
        mirror.restore(tmp_path / "new", 2)
    assert not (tmp_path / "new").exists()


def test_a_damaged_latest_copy_leaves_the_best(tmp_path: Path) -> None:
    there, here, new = tmp_path / "there", tmp_path / "here" / "r", tmp_path / "new" / "r"
    mirror = Mirror(there.as_uri(), "r")
    mirror.push(here, save(here, 1, is_best=True))
    mirror.push(here, save(here, 2))
    (there / "r" / "checkpoints" / "step_00000002" / "model.safetensors").write_bytes(b"cut")
    mirror.restore(new, 2)
    found, told = Checkpoints(new, 2).intact()
    assert found == new / "checkpoints" / "step_00000001" and "is damaged" in told[0] and "from step 1" in told[0]


def began(run_dir: Path, started: float) -> None:
    record = {"kind": "pretrain", "name": run_dir.name, "started": started}
    (run_dir / RUN_FILE).write_text(json.dumps(record), encoding="utf8")


def test_another_run_of_the_name_is_not_replaced_unasked(tmp_path: Path) -> None:
    mirror, first, second = Mirror((tmp_path / "there").as_uri(), "r"), tmp_path / "a" / "r", tmp_path / "b" / "r"
    mirror.check()
    for step in (1, 2, 3, 4):
        checkpoint = save(first, step, is_best=step == 3)
        began(first, 1.0)
        assert mirror.push(first, checkpoint) is None
    mirror.check(first)
    checkpoint = save(second, 1)
    began(second, 2.0)
    for run_dir in (None, second):
        with pytest.raises(UserError, match="holds another run named r; continue that with --is_keep_training=True"):
            mirror.check(run_dir)
    assert mirror.restore(second, 2) is None, "a run that began here is not continued from another's copies"
    mirror.check(second, overwrite=True)
    assert mirror.push(second, checkpoint) is None
    there = tmp_path / "there" / "r"
    assert (there / "LATEST").read_text() == "step_00000001", "the best of the other run is none of this one"
    assert [path.name for path in (there / "checkpoints").iterdir()] == ["step_00000001"]
    restored = mirror.restore(tmp_path / "c" / "r", 2)
    assert restored is not None and content(restored) == content(checkpoint)


@pytest.mark.skipif(os.name == "nt", reason="os.fork")
def test_a_kill_while_another_run_is_replaced_mixes_nothing(tmp_path: Path) -> None:
    for number in range(1000):
        folder = tmp_path / str(number)
        first, second, uri = folder / "a" / "r", folder / "b" / "r", (folder / "there").as_uri()
        checkpoint = save(first, 5, is_best=True, text="first")
        began(first, 1.0)
        assert Mirror(uri, "r").push(first, checkpoint) is None
        other = save(second, 2, text="second")
        began(second, 2.0)

        def push(second: Path = second, uri: str = uri, other: Path = other, number: int = number) -> None:
            die_at(number, False, is_mirror=True)
            mirror = Mirror(uri, "r")
            mirror.check(second, overwrite=True)
            assert mirror.push(second, other) is None

        code, new = run_child(push), folder / "c" / "r"
        restored = Mirror(uri, "r").restore(new, 2)
        if restored is not None:
            is_second = json.loads((new / RUN_FILE).read_text())["started"] == 2.0
            assert (restored / "model.safetensors").read_bytes().endswith(b"second" if is_second else b"first")
        if code == 0:
            break
        assert code == DIED
    assert number > 5 and restored is not None


def test_a_place_that_is_gone_is_not_made_anew(tmp_path: Path) -> None:
    mirror, here = Mirror((tmp_path / "there").as_uri(), "r"), tmp_path / "here"
    mirror.check()
    os.replace(tmp_path / "there", tmp_path / "unmounted")
    told = mirror.push(here, save(here, 1))
    assert told is not None and "is no longer there" in told and not (tmp_path / "there").exists()


def test_a_failed_copy_is_told_and_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mirror, here = Mirror((tmp_path / "there").as_uri(), "r"), tmp_path / "here"
    mirror.push(here, save(here, 1))

    def fail(*args: object) -> None:
        raise OSError("the network is gone")

    with monkeypatch.context() as patch:
        patch.setattr("training.checkpoints.mirror.fs.copy_files", fail)
        told = mirror.push(here, save(here, 2))
    assert told is not None and "step 2 could not be copied (the network is gone)" in told
    restored = mirror.restore(tmp_path / "new", 2)
    assert restored is not None and restored.name == "step_00000001"


def test_wrong_addresses_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="checkpoint_mirror = nowhere://x, cannot be opened"):
        Mirror("nowhere://x", "r")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        Mirror((tmp_path / "file").as_uri(), "r").check()
    with pytest.raises(UserError, match="cannot be opened") as caught:
        Mirror("s3://KEY:sec/ret@bucket/my folder", "r")
    assert "ret" not in str(caught.value) and "%20" in str(caught.value)
    with pytest.raises(UserError, match="checkpoint_mirror = folder, is no address"):
        load("train", {"checkpoint_mirror": "folder"})


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
        run_dir = save(tmp_path / "runs" / "r", 1).parents[1]
        (run_dir / RUN_FILE).write_text('{"kind": "pretrain", "name": "r", "started": 1.0}')
        resume_run(run_dir, launch=launch_marks())
    assert goes_on(config_of(tmp_path, run_name="r", is_keep_training=asked)) is expected


def test_a_run_is_found_again_at_its_mirror(tmp_path: Path) -> None:
    uri = (tmp_path / "there").as_uri()
    Mirror(uri, "r").push(tmp_path / "elsewhere", save(tmp_path / "elsewhere", 7))
    assert goes_on(config_of(tmp_path, run_name="r", is_keep_training="auto", checkpoint_mirror=uri))
    assert Checkpoints(tmp_path / "runs" / "r", 2).latest() is not None


def test_auto_needs_a_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is_keep_training = auto, needs a run_name"):
        config_of(tmp_path, is_keep_training="auto")
    assert goes_on(config_of(tmp_path, is_keep_training="True")), "the newest run"


@pytest.mark.skipif(os.name == "nt", reason="os.fork")
@pytest.mark.parametrize("is_after", [False, True])
def test_a_kill_at_every_single_change_of_the_mirror(tmp_path: Path, is_after: bool) -> None:
    """Copies 1 (the best), 2 and 3; dies while copying 4. A new machine finds 3 or 4 and the best, and the next copy is as ever."""
    for number in range(1000):
        folder = tmp_path / str(number)
        here, uri = folder / "here" / "r", (folder / "there").as_uri()
        for step in (1, 2, 3):
            assert Mirror(uri, "r").push(here, save(here, step, keep=1, is_best=step == 1)) is None
        fourth = save(here, 4, keep=1, is_best=True)

        def push(here: Path = here, uri: str = uri, fourth: Path = fourth, number: int = number) -> None:
            die_at(number, is_after, is_mirror=True)
            assert Mirror(uri, "r").push(here, fourth) is None

        code = run_child(push)
        for new in ("new", "newer"):
            restored = Mirror(uri, "r").restore(folder / new / "r", 1)
            found, best = Checkpoints(folder / new / "r", 1), Checkpoints(folder / new / "r", 1).best()
            assert restored is not None and found.intact() == (restored, []) and best is not None
            last = int(restored.name[-1])
            assert last in ((4,) if new == "newer" else (3, 4)) and best.name[-1] == ("4" if last == 4 else "1")
            assert json.loads((folder / new / "r" / SETTINGS_FILE).read_text())["step"] in (last, 4)
            assert Mirror(uri, "r").push(here, fourth) is None
        if code == 0:
            break
        assert code == DIED
    assert number > 20, "every change was a moment of its own"


def test_what_the_service_lost_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = tmp_path / "there" / "r"
    mirror, here = Mirror(there.parent.as_uri(), "r"), tmp_path / "here"
    mirror.push(here, save(here, 1))
    os.replace(there / "checkpoints" / "step_00000001", there / "checkpoints" / "other")
    with pytest.raises(UserError, match="LATEST names step_00000001, which is not there, which no run writes"):
        mirror.restore(tmp_path / "new", 2)
    (there / SETTINGS_FILE).unlink()
    with pytest.raises(UserError, match=r"cannot be restored \(.*settings\.json.*\); check address, network and disk"):
        mirror.restore(tmp_path / "newer", 2)


def test_a_best_that_is_here_already_is_not_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mirror, here = Mirror((tmp_path / "there").as_uri(), "r"), tmp_path / "here"
    for step in (1, 2):
        mirror.push(here, save(here, step, is_best=step == 1))
    new = tmp_path / "new"
    mirror.restore(new, 2)
    before = (new / "checkpoints" / "step_00000001" / "model.safetensors").stat().st_ino
    mirror.push(here, save(here, 3))
    assert mirror.restore(new, 2) == new / "checkpoints" / "step_00000003"
    assert (new / "checkpoints" / "step_00000001" / "model.safetensors").stat().st_ino == before
