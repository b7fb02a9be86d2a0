"""Files and folders are whole or not there, made once, and read only as far as such a file can go."""

from __future__ import annotations

import errno
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from settings.errors import UserError
from settings.fields import read_settings_file
from storage import (
    MOST_BYTES,
    atomic_folder,
    is_full,
    make_once,
    read_bytes,
    read_text,
    remove,
)


@pytest.mark.parametrize(
    "error, full",
    [
        (OSError(errno.ENOSPC, "x"), True),
        (OSError("[Errno 28] Error writing bytes to file. Detail: [errno 28] No space left on device"), True),
        (OSError("4096 requested and 0 written"), True),
        (OSError(errno.EIO, "Input/output error"), False),
        (ValueError("No space left"), False),
    ],
)
def test_a_full_disk_is_known_however_it_is_told(error: Exception, full: bool) -> None:
    assert is_full(error) is full


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


def test_a_full_disk_and_an_unusable_folder_are_user_errors(tmp_path: Path) -> None:
    def full(partial: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(UserError, match="the disk is full"):
        make_once(tmp_path / "target", full)
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="cannot be written"):
        make_once(tmp_path / "file" / "target", Path.mkdir)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


@pytest.mark.skipif(os.name == "nt", reason="needs pipes")
@pytest.mark.parametrize("endless", [pipe, sparse])
def test_a_file_without_an_end_is_refused(tmp_path: Path, endless: Callable[[Path], None]) -> None:
    endless(tmp_path / "config.json")
    with pytest.raises(OSError):
        read_text(tmp_path / "config.json")


def test_settings_may_come_through_a_pipe_and_have_an_end(tmp_path: Path) -> None:
    sparse(tmp_path / "settings.yaml")
    with pytest.raises(UserError, match="larger than 16 MiB"):
        read_settings_file(tmp_path / "settings.yaml")
    reading, writing = os.pipe()
    os.write(writing, b"seed: 7\n")
    os.close(writing)
    assert read_settings_file(Path(f"/dev/fd/{reading}")) == {"seed": 7}
    os.close(reading)


def test_a_file_of_the_largest_size_is_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    assert read_bytes(tmp_path / "a", 5) == b"12345" and read_text(tmp_path / "a", 5) == "12345"
    for path, most in ((tmp_path / "a", 4), (tmp_path, 9), (tmp_path / "none", 9)):
        with pytest.raises(OSError):
            read_bytes(path, most)
    assert MOST_BYTES > 10**6


def test_a_folder_takes_the_place_of_another_or_leaves_it(tmp_path: Path) -> None:
    for content in ("first", "second"):
        with atomic_folder(tmp_path / "made") as fresh:
            (fresh / content).write_text(content)
    with pytest.raises(ValueError, match="no"), atomic_folder(tmp_path / "made") as fresh:
        (fresh / "third").write_text("x")
        raise ValueError("no")
    assert [path.name for path in tmp_path.rglob("*")] == ["made", "second"]
    remove(tmp_path / "made")
    assert list(tmp_path.iterdir()) == []
