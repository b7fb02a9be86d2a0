"""A run has one owner: a second one is refused and told of the first, and a dead one is in nobody's way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from training.ownership import OWNER_FILE, Ownership

ROOT = Path(__file__).resolve().parent.parent.parent
OWNER = """
import sys
from pathlib import Path
from training.ownership import Ownership
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


def test_a_file_system_without_locks_and_one_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(error: Exception) -> None:
        def acquire(lock: FileLock, timeout: float) -> None:
            raise error

        monkeypatch.setattr(FileLock, "acquire", acquire)

    with Ownership() as owner:
        failing(NotImplementedError())
        assert owner.take(tmp_path / "run") == []
        owner.sign()
        assert not (tmp_path / "run").exists(), "what is not held is not signed"
        failing(OSError(30, "Read-only file system"))
        (problem,) = owner.take(tmp_path / "run")
        assert problem == f"--output_dir = {tmp_path}, cannot be written: Read-only file system; name another folder"
