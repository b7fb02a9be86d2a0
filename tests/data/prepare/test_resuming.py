"""A preparing that is killed continues after its last shard, and nobody can tell from the shards."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data.prepare import duplicates
from data.prepare.preparing import prepare
from data.shards import writer
from settings.declared import ROOT
from settings.errors import UserError
from settings.loading import load

# Runs `prepare` and kills itself when as much as the n-th time something is on the disk.
KILLED = """
import json, os, signal, sys
from data.prepare import duplicates, preparing
from data.shards import writer
from settings.loading import load
flags, kill_at = json.loads(sys.argv[1]), int(sys.argv[2])
duplicates.PART_ROWS = 1
writer.SHARD_ROWS = 160
written = iter(range(1, kill_at))
fsync = os.fsync
os.fsync = lambda file: fsync(file) if next(written, 0) else os.kill(os.getpid(), signal.SIGKILL)
preparing.prepare(load("prepare", flags))
"""


class Disk:
    """What goes to the disk: counted, and refused or interrupted from a number on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.writes = 0
        self.full_at = 0
        self.interrupts: Callable[[], bool] = lambda: False
        fsync, plain_file, disk = os.fsync, io.FileIO, self

        def count() -> None:
            disk.writes += 1
            if disk.writes == disk.full_at:
                raise OSError(errno.ENOSPC, "No space")

        def counted_fsync(file: int) -> None:
            count()
            fsync(file)
            if disk.interrupts():
                raise KeyboardInterrupt

        class CountedFile(plain_file):  # type: ignore[misc, valid-type]
            def write(self, data: Any) -> int:
                count()
                return int(super().write(data))

        monkeypatch.setattr(os, "fsync", counted_fsync)
        monkeypatch.setattr(io, "FileIO", CountedFile)
        monkeypatch.setattr(writer, "BUFFER_BYTES", 4096)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    monkeypatch.setattr(duplicates, "PART_ROWS", 1)
    monkeypatch.setattr(writer, "SHARD_ROWS", 160)
    return Disk(monkeypatch)


def corpus(folder: Path, rows: int, in_turns: bool = False) -> Path:
    """Pairs, or conversations of 0 to 4 questions; some twice, some broken."""
    draw = random.Random(0)
    lines = []
    for row in range(rows):
        text = " ".join(draw.choices("abcdefgh", k=draw.randrange(1, 80))) if row % 10 else "the same each time"
        pair = {"prompt": f"{row % 10 and row} {text}", "response": text}
        talk = {"messages": [[f"{turn}?", f"{text[:40]} {turn}"] for turn in range(row % 5)]}
        line = json.dumps(talk if in_turns else pair)
        lines.append("{broken" if row % 97 == 5 else line)
    path = folder / f"{in_turns}.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf8")
    return path


@pytest.fixture
def flags(tmp_path: Path, byte_dir: Path) -> dict[str, str]:
    return {
        "train_file": str(corpus(tmp_path, 900)),
        "tokenizer_dir": str(byte_dir),
        "skip_bad_rows": "True",
        "cache_dir": str(tmp_path / "cache"),
        "shards_dir": str(tmp_path / "shards"),
        "max_seq_len": "64",
        "prepare_workers": "0",
        "dedup": "exact",
    }


def prepared(flags: dict[str, str], folder: str | Path, **more: str) -> dict[str, str]:
    """Digest of every file that a preparing has left in its folder."""
    root = prepare(load("prepare", {**flags, "shards_dir": str(folder), **more})).train_dir.parent
    files = sorted(path for path in root.rglob("*") if path.is_file())
    return {path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_a_killed_preparing_ends_with_the_same_bytes(flags: dict[str, str], tmp_path: Path, disk: Disk) -> None:
    flags |= {"train_file": str(corpus(tmp_path, 500, True)), "expand_turns": "True", "prompt_template": "alpaca"}
    unbroken = prepared(flags, tmp_path / "unbroken")
    writes = disk.writes
    command = [sys.executable, "-c", KILLED, json.dumps(flags), str(writes // 3)]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == -signal.SIGKILL
    states = sorted((tmp_path / "shards.partial" / "states").glob("0*.json"))
    assert len(states) > 2, "shards were finished before"
    listed = sum(state.read_text().count(".arrow") for state in states)
    assert listed == int(states[-1].stem), "a state lists the shards since the one before alone"
    disk.writes = 0
    assert prepared(flags, tmp_path / "shards") == unbroken
    assert 0 < disk.writes < 0.9 * writes, "it has not begun from the start"
    assert len([name for name in unbroken if name.startswith("train/")]) > 2
    assert not list(tmp_path.glob("shards.*partial*"))


def test_a_full_disk_keeps_what_is_done_and_the_next_attempt_goes_on(
    flags: dict[str, str], tmp_path: Path, disk: Disk
) -> None:
    """Whatever it is that no longer fits: rows, a shard, the saved state, the tokenizer, the manifest."""
    unbroken = prepared(flags, tmp_path / "unbroken")
    writes = disk.writes
    target = tmp_path / "shards"
    for full_at in (2, writes // 2, writes // 2 + 1, writes - 1):
        disk.writes = 0
        disk.full_at = full_at
        with pytest.raises(UserError, match=f"{target}.partial"):
            prepared(flags, target)
        assert not target.exists()
        disk.writes = 0
        disk.full_at = 0
        assert prepared(flags, target) == unbroken
        assert disk.writes < writes or full_at == 2, "it has begun from the start"
        shutil.rmtree(target)


def interrupted(flags: dict[str, str], tmp_path: Path, disk: Disk) -> Path:
    """The folder of an attempt that was interrupted behind its third state."""
    states = tmp_path / "shards.partial" / "states"
    disk.interrupts = lambda: (
        len(list(states.glob("*.json"))) > 2 and len(states.joinpath("parts.jsonl").read_text().splitlines()) > 2
    )
    with pytest.raises(KeyboardInterrupt):
        prepare(load("prepare", flags))
    disk.interrupts = lambda: False
    return states.parent


@pytest.mark.parametrize("changed", [{}, {"max_seq_len": "48"}])
def test_a_damaged_state_and_an_attempt_at_another_job_are_passed_over(
    flags: dict[str, str], tmp_path: Path, disk: Disk, changed: dict[str, str]
) -> None:
    *_, before, last = sorted((interrupted(flags, tmp_path, disk) / "states").glob("*.json"))
    last.write_bytes(before.read_bytes())
    assert prepared(flags, tmp_path / "shards", **changed) == prepared(flags, tmp_path / "alone", **changed)


def test_the_number_of_processes_changes_nothing(flags: dict[str, str], tmp_path: Path, disk: Disk) -> None:
    flags |= {"train_file": str(corpus(tmp_path, 300, True)), "expand_turns": "True", "clean": "True"}
    assert prepared(flags, tmp_path / "a") == prepared(flags, tmp_path / "b", prepare_workers="2")
