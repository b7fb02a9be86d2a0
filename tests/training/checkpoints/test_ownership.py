"""A run has one owner: a second one is refused and told of the first, and a dead one is in nobody's way."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from storage import make_once
from training.checkpoints.ownership import OWNER_FILE, Ownership

ROOT = Path(__file__).resolve().parent.parent.parent.parent
OWNER = """
import sys
from pathlib import Path
from training.checkpoints.ownership import Ownership
with Ownership() as owner:
    assert owner.take(Path(sys.argv[1])) == []
    owner.sign()
    print("taken", flush=True)
    sys.stdin.read()
"""


def start_owner(run_dir: Path) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(run_dir)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None and child.stdout.readline() == "taken\n"
    return child


def test_a_second_owner_is_refused_and_told_of_the_first(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    child = start_owner(run_dir)
    try:
        with Ownership() as second:
            (problem,) = second.take(run_dir)
            host = json.loads((run_dir / OWNER_FILE).read_text())["host"]
            for part in ("--run_name = run, is in use", f"process {child.pid} on {host}, since ", "name another run"):
                assert part in problem
            assert second.take(tmp_path / "other") == [], "another run is free"
        assert json.loads((run_dir / OWNER_FILE).read_text())["process"] == child.pid, "the first one's record stays"
    finally:
        child.communicate("")
    with Ownership() as third:
        assert third.take(run_dir) == [] and not (run_dir / OWNER_FILE).exists()


@pytest.mark.skipif(os.name == "nt", reason="needs links")
@pytest.mark.parametrize("link, name", [("runs/alias", "runs/alias"), ("other", "other/run")])
def test_a_run_under_another_name_is_the_same_run(tmp_path: Path, link: str, name: str) -> None:
    run_dir = tmp_path / "runs" / "run"
    run_dir.mkdir(parents=True)
    (tmp_path / link).symlink_to(run_dir if link == name else run_dir.parent, target_is_directory=True)
    with Ownership() as first, Ownership() as second:
        assert first.take(run_dir) == []
        assert "is in use" in second.take(tmp_path / name)[0]


@pytest.mark.skipif(os.name == "nt", reason="needs links")
def test_a_lock_that_is_a_link_makes_nothing_elsewhere(tmp_path: Path) -> None:
    (tmp_path / ".run.lock").symlink_to(tmp_path / "elsewhere")
    with Ownership() as owner:
        assert "cannot be written" in owner.take(tmp_path / "run")[0]
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.skipif(os.name == "nt", reason="kill -9")
def test_a_dead_owner_is_taken_over(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    child = start_owner(run_dir)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert (run_dir / OWNER_FILE).is_file()
    with Ownership() as second:
        assert second.take(run_dir) == []
        second.sign()
        assert json.loads((run_dir / OWNER_FILE).read_text())["process"] == os.getpid()
    assert not (run_dir / OWNER_FILE).exists()


def test_two_in_one_process(tmp_path: Path) -> None:
    with Ownership() as first, Ownership() as second:
        assert first.take(tmp_path / "run") == first.take(tmp_path / "run") == []
        assert "another process" in second.take(tmp_path / "run")[0]
        assert first.take(tmp_path / "other") == [], "the run before is given back"
        assert second.take(tmp_path / "run") == []


@pytest.mark.parametrize("content", ["", "[]", '{"process": "x", "host": 1, "started": null}', '{"process": 1}'])
def test_a_broken_record_is_no_obstacle(tmp_path: Path, content: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / OWNER_FILE).write_text(content)
    with Ownership() as first, Ownership() as second:
        assert first.take(tmp_path / "run") == []
        assert "another process" in second.take(tmp_path / "run")[0]


@pytest.mark.skipif(os.name == "nt", reason="fcntl")
@pytest.mark.parametrize("failure", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: int) -> None:
    import fcntl

    with Ownership() as owner:
        assert owner.take(tmp_path / "run") == [] and owner.remark is None

    def flock(handle: int, operation: int) -> None:
        raise OSError(failure, os.strerror(failure))

    monkeypatch.setattr(fcntl, "flock", flock)
    (tmp_path / "run").mkdir()
    with Ownership() as owner:
        assert owner.take(tmp_path / "run") == []
        assert (
            owner.remark is not None
            and "without locks" in owner.remark
            and f"--output_dir = {tmp_path}" in owner.remark
        )
        owner.sign()
        assert json.loads((tmp_path / "run" / OWNER_FILE).read_text())["process"] == os.getpid()
    assert not (tmp_path / "run" / OWNER_FILE).exists()
    made = make_once(tmp_path / "made", lambda path: path.write_text("x"))
    assert made.read_text() == "x", "what is made once is made here as well"


def test_an_owner_whose_clock_was_ahead_has_no_negative_age(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with Ownership() as first, Ownership() as second:
        assert first.take(tmp_path / "run") == []
        record = {"process": 7, "host": "h", "started": 4e9}
        (tmp_path / "run" / OWNER_FILE).write_text(json.dumps(record))
        assert "process 7 on h, since 0s," in second.take(tmp_path / "run")[0]


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def acquire(lock: FileLock, timeout: float) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(FileLock, "acquire", acquire)
    with Ownership() as owner:
        (problem,) = owner.take(tmp_path / "run")
    assert problem == f"--output_dir = {tmp_path}, cannot be written: Read-only file system; name another folder"
