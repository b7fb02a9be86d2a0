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

from training.checkpoints.run_lock import RunLock
from training.report.run_files import OWNER_FILE

ROOT = Path(__file__).resolve().parent.parent.parent.parent
OWNER = """
import sys
from pathlib import Path
from training.checkpoints.run_lock import RunLock
with RunLock() as lock:
    assert lock.acquire(Path(sys.argv[1])) == []
    lock.write_owner()
    print("locked", flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(os.name == "nt", reason="kill -9")
def test_a_second_owner_is_refused_until_the_first_is_dead(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    child = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(run_dir)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None and child.stdout.readline() == "locked\n"
    with RunLock() as second:
        (problem,) = second.acquire(run_dir)
        host = json.loads((run_dir / OWNER_FILE).read_text())["host"]
        assert "--run_name = run, is in use" in problem and f"process {child.pid} on {host}, since " in problem
        assert second.acquire(tmp_path / "other") == [], "another run is free"
    assert json.loads((run_dir / OWNER_FILE).read_text())["process"] == child.pid, "the first one's record stays"
    child.send_signal(signal.SIGKILL)
    child.communicate()
    with RunLock() as third:
        assert third.acquire(run_dir) == []
        third.write_owner()
        assert json.loads((run_dir / OWNER_FILE).read_text())["process"] == os.getpid()
    assert not (run_dir / OWNER_FILE).exists()


@pytest.mark.skipif(os.name == "nt", reason="needs links")
def test_a_run_under_another_name_is_the_same_run(tmp_path: Path) -> None:
    (tmp_path / "runs" / "run").mkdir(parents=True)
    (tmp_path / "other").symlink_to(tmp_path / "runs", target_is_directory=True)
    with RunLock() as first, RunLock() as second:
        assert first.acquire(tmp_path / "runs" / "run") == first.acquire(tmp_path / "runs" / "run") == []
        assert "is in use" in second.acquire(tmp_path / "other" / "run")[0]
        assert first.acquire(tmp_path / "another") == [], "the run before is released"
        assert second.acquire(tmp_path / "other" / "run") == []


@pytest.mark.skipif(os.name == "nt", reason="fcntl")
def test_a_file_system_without_locks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    def flock(handle: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    (tmp_path / "run").mkdir()
    with RunLock() as lock:
        assert lock.acquire(tmp_path / "run") == []
        assert lock.warning is not None and f"--output_dir = {tmp_path}" in lock.warning
        lock.write_owner()
