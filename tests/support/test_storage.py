"""Files and folders are whole or not there, made once, and read only as far as such a file can go."""

from __future__ import annotations

import builtins
import errno
import functools
import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults.disk_faults import watch_changes
from settings.errors import UserError
from settings.fields import read_settings_file
from support.storage import (
    OtherParts,
    Parts,
    atomic_folder,
    make_once,
    read_text,
    remove,
)
from tests.killing import DIED, run_child


def test_a_failure_leaves_nothing_and_the_next_attempt_begins_clean(tmp_path: Path) -> None:
    def fail(partial: Path) -> None:
        partial.mkdir()
        (partial / "half").write_text("x")
        raise ValueError("no")

    target = tmp_path / "target"
    with pytest.raises(ValueError, match="no"):
        make_once(target, fail)
    assert not target.exists() and not list(tmp_path.glob("*.partial"))
    (tmp_path / "target.partial").mkdir()  # A killed process leaves such a folder.
    (tmp_path / "target.partial" / "old").write_text("x")
    make_once(target, Path.mkdir)
    assert list(target.iterdir()) == []


def test_a_full_disk_and_an_unusable_folder_are_user_errors(tmp_path: Path) -> None:
    def full(partial: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(UserError, match="the disk is full"):
        make_once(tmp_path / "target", full)
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="cannot be written"):
        make_once(tmp_path / "file" / "target", Path.mkdir)


@pytest.mark.skipif(os.name == "nt", reason="needs pipes")
def test_a_file_without_an_end_is_refused_but_settings_may_come_through_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(2**40)
    for name in ("pipe", "sparse"):
        with pytest.raises(OSError):
            read_text(tmp_path / name)
    with pytest.raises(UserError, match="larger than 16 MiB"):
        read_settings_file(tmp_path / "sparse")
    reading, writing = os.pipe()
    os.write(writing, b"seed: 7\n")
    os.close(writing)
    assert read_settings_file(Path(f"/dev/fd/{reading}")) == {"seed": 7}
    os.close(reading)


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


WORK = {0: b"", 2: b"third" * 1000}


def make_parts(folder: Path) -> list[int]:
    """Make the parts that are missing; their numbers."""
    parts = Parts(folder, "of this work", ".bin")
    made_anew = [part for part in WORK if part not in parts]
    for part in made_anew:
        with parts.write(part, {"rows": part}) as path:
            path.write_bytes(WORK[part])
    return made_anew


def content_of(folder: Path) -> list[tuple[bytes, object]]:
    parts = Parts(folder, "of this work", ".bin")
    return [(parts.path(part).read_bytes(), parts.facts(part)) for part in parts]


def die_before_call(number: int) -> None:
    """Let this process end before a call of the system that changes the disk or opens a file."""
    calls = iter(range(1_000_000))

    def around(name: str, plain: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if next(calls) == number:
            os._exit(DIED)
        return plain(*arguments, **named)

    watch_changes(around)
    os.open = functools.partial(around, "open", os.open)
    builtins.open = io.open = functools.partial(around, "open", io.open)


@pytest.mark.skipif(os.name == "nt", reason="needs fork")
def test_work_in_parts_goes_on_right_wherever_it_was_killed(tmp_path: Path) -> None:
    expected = [(WORK[part], {"rows": part}) for part in WORK]
    number = 0
    code = DIED
    while code == DIED:
        folder = tmp_path / str(number)

        def work(folder: Path = folder, number: int = number) -> None:
            die_before_call(number)
            make_parts(folder)

        code = run_child(work)
        done = content_of(folder)
        assert done == expected[: len(done)]
        assert make_parts(folder) == list(WORK)[len(done) :]
        assert content_of(folder) == expected
        number += 1
    assert code == 0
    assert number > 20, "the calls were counted"


def test_a_part_counts_only_as_it_was_written(tmp_path: Path) -> None:
    sound = tmp_path / "sound"
    folder = tmp_path / "parts"
    make_parts(sound)
    whole = content_of(sound)
    (sound / ".tmp-00000003.bin").write_bytes(b"a leftover")
    (sound / "00000004.bin").write_bytes(b"in no manifest")

    def flip(path: Path, index: int) -> None:
        content = bytearray(path.read_bytes())
        content[index] ^= 1
        path.write_bytes(content)

    def replace(path: Path, make: Callable[[Path], object]) -> None:
        path.unlink()
        make(path)

    part = folder / "00000002.bin"
    harms: list[tuple[Callable[[], object], list[int]]] = [
        (lambda: None, []),
        (lambda: flip(part, 77), [2]),
        (lambda: os.truncate(part, 3), [2]),
        (lambda: replace(part, lambda path: path.symlink_to(sound / "00000002.bin")), [2]),
        (lambda: flip(folder / "parts.jsonl", 20), [0]),
        (lambda: replace(folder / "parts.jsonl", lambda path: path.write_text('[]\n"x"\n{}\n')), [0, 2]),
    ]
    if hasattr(os, "mkfifo"):  # Nobody writes to these pipes.
        harms.append((lambda: replace(part, os.mkfifo), [2]))
        harms.append((lambda: replace(folder / "parts.jsonl", os.mkfifo), [0, 2]))
    for harm, made_anew in harms:
        shutil.copytree(sound, folder)
        harm()
        assert make_parts(folder) == made_anew
        assert content_of(folder) == whole
        shutil.rmtree(folder)


def test_parts_of_other_work_are_refused_only_where_there_are_any(tmp_path: Path) -> None:
    make_parts(tmp_path / "parts")
    with pytest.raises(OtherParts):
        Parts(tmp_path / "parts", "of other work", ".bin")
    for part in WORK:
        (tmp_path / "parts" / f"{part:08d}.bin").write_bytes(b"damaged")
    assert list(Parts(tmp_path / "parts", "of other work", ".bin")) == []
    assert not (tmp_path / "nothing").exists() and list(Parts(tmp_path / "nothing", "x")) == []
