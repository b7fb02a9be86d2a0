from __future__ import annotations

import errno
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from data.cache import NotMade, fingerprint, make_once, only_if_made
from data.locks import lock_at
from settings.fields import UserError


def test_it_is_made_once(tmp_path: Path) -> None:
    made = []

    def make(partial: Path) -> None:
        made.append(partial)
        partial.write_text("content")

    target = tmp_path / "deep" / "target"
    assert make_once(target, make) == target == make_once(target, make)
    assert target.read_text() == "content" and len(made) == 1 and not made[0].exists()


def test_a_failure_leaves_nothing_and_the_next_attempt_begins_clean(tmp_path: Path) -> None:
    def fail(partial: Path) -> None:
        partial.mkdir()
        (partial / "half").write_text("x")
        raise ValueError("no")

    target = tmp_path / "target"
    with pytest.raises(ValueError, match="no"):
        make_once(target, fail)
    assert not target.exists() and not list(tmp_path.glob("*.partial"))
    (tmp_path / "target.partial").mkdir()  # what a killed process leaves
    (tmp_path / "target.partial" / "old").write_text("x")
    make_once(target, Path.mkdir)
    assert list(target.iterdir()) == []


def _make_together(target: Path, log: Path, barrier: Any) -> None:
    def make(partial: Path) -> None:
        with log.open("a") as file:
            file.write("made\n")
        partial.write_text("x")

    barrier.wait()
    make_once(target, make)


def test_processes_that_start_together_make_it_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(3)
    arguments = (tmp_path / "target", tmp_path / "log", barrier)
    processes = [context.Process(target=_make_together, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert (tmp_path / "log").read_text() == "made\n"


@pytest.mark.skipif(os.name == "nt", reason="os.fork")
def test_who_waits_for_another_says_so(tmp_path: Path) -> None:
    target = tmp_path / "target"
    read, write = os.pipe()
    lock = lock_at(Path(f"{target}.lock"))
    assert lock is not None
    lock.acquire()
    context = multiprocessing.get_context("fork")
    waiting = context.Process(target=_make_told, args=(target, write))
    waiting.start()
    os.close(write)
    with os.fdopen(read, encoding="utf8") as told:
        assert told.readline() == f"another process is making {target}: waiting until it is done\n"
        assert not target.exists()
        lock.release()
        assert told.read() == "", "it is told once"
    waiting.join()
    assert waiting.exitcode == 0 and target.is_dir()


def _make_told(target: Path, stream: int) -> None:
    with os.fdopen(stream, "w", encoding="utf8") as sys.stderr:
        make_once(target, Path.mkdir)


def test_a_full_disk_and_an_unusable_folder_are_user_errors(tmp_path: Path) -> None:
    def full(partial: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(UserError, match="the disk is full"):
        make_once(tmp_path / "target", full)
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="cannot be written"):
        make_once(tmp_path / "file" / "target", Path.mkdir)


@pytest.mark.parametrize(
    ("reason", "resumable", "is_kept"),
    [(OSError(errno.EIO, "no"), True, True), (OSError(errno.EIO, "no"), False, False), (ValueError("row 7 is none"), True, False)],
    ids=["the network", "made whole", "the data"],
)  # fmt: skip
def test_what_was_made_is_kept_where_a_read_has_failed(
    tmp_path: Path, reason: Exception, resumable: bool, is_kept: bool
) -> None:
    def read(partial: Path) -> None:
        partial.write_text("half")
        try:
            raise reason
        except (OSError, ValueError) as error:
            raise UserError(f"s3://there, cannot be read ({error})") from None

    with pytest.raises(UserError, match="cannot be read"):
        make_once(tmp_path / "target", read, resumable)
    assert (tmp_path / "target.partial").exists() == is_kept


def test_only_if_made_makes_nothing(tmp_path: Path) -> None:
    with pytest.raises(NotMade):
        only_if_made(tmp_path / "target", Path.mkdir)
    assert list(tmp_path.iterdir()) == []


def test_equal_values_have_equal_fingerprints() -> None:
    assert fingerprint({"a": 1, "b": [2]}) == fingerprint({"b": [2], "a": 1}) != fingerprint({"a": 1, "b": [3]})
