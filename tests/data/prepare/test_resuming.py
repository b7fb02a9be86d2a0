"""A preparing that is killed continues after its last shard, and nobody can tell from the shards."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from errno import ENOSPC
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common import storage
from data.prepare import duplicates
from data.prepare.encode import Encoder
from data.prepare.preparing import prepare
from data.shards import writer
from data.shards.writer import ShardWriter
from settings.declared import ROOT, Config
from settings.errors import UserError
from settings.loading import load

# Runs `prepare` and kills itself before the n-th batch or file that goes to the disk; says how many an unbroken run
# writes.
PREPARING = """
import json, os, signal, sys
from common import storage
from config import load
from data.prepare import duplicates, preparing
from data.shards import writer
from data.shards.writer import ShardWriter
flags, kill_at = json.loads(sys.argv[1]), int(sys.argv[2])
duplicates.PART_ROWS = 1
writer.SHARD_ROWS = 128
writes = 0
def counted(write):
    def count(*arguments):
        global writes
        writes += 1
        if writes == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(*arguments)
    return count
for place, name in (ShardWriter, "_write"), (storage, "_sync"):
    setattr(place, name, counted(getattr(place, name)))
preparing.prepare(load("prepare", flags))
print(writes)
"""


def corpus(path: Path, rows: int) -> Path:
    draw = random.Random(0)
    words = [str(number) for number in range(300)]
    with path.open("w", encoding="utf8") as file:
        for row in range(rows):
            text = " ".join(draw.choices(words, k=draw.randrange(1, 120))) if row % 10 else "the same each time"
            pair = {"prompt": f"{row % 10 and row} {text}", "response": text}
            file.write("{broken\n" if row % 97 == 5 else json.dumps(pair) + "\n")
    return path


def talks(folder: Path, rows: int) -> dict[str, str]:
    """Flags that replace those of `corpus` by every answer of its rows as conversations of 0 to 4 questions."""
    path, lines = folder / "talks.jsonl", corpus(folder / "pairs.jsonl", rows).read_text(encoding="utf8").splitlines()
    with path.open("w", encoding="utf8") as file:
        for number, line in enumerate(lines):
            said = "" if line == "{broken" else json.loads(line)["response"][:40]
            turns = [[f"{turn}?", f"{said} {turn}"] for turn in range(number % 5)]
            file.write(json.dumps({"messages": turns}) + "\n" if said else "{broken\n")
    return {"train_file": str(path), "expand_turns": "True", "prompt_template": "alpaca"}


def run(flags: dict[str, str], kill_at: int) -> int:
    """Writes to the disk of a preparing, or the signal that ended it."""
    command = [sys.executable, "-c", PREPARING, json.dumps(flags), str(kill_at)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    return done.returncode or int(done.stdout)


def job(folder: Path, tokenizer: Path, rows: int, **more: str) -> dict[str, str]:
    """The flags of a preparing of so many rows; `more` replaces some."""
    return {
        "train_file": str(corpus(folder / "a.jsonl", rows)),
        "tokenizer_dir": str(tokenizer),
        "skip_bad_rows": "True",
        "cache_dir": str(folder / "cache"),
        "shards_dir": str(folder / "shards"),
        "max_seq_len": "64",
        "prepare_workers": "0",
        **more,
    }


def content(folder: Path) -> dict[str, str]:
    """Digest of every file."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_a_killed_preparing_ends_with_the_same_bytes(tmp_path: Path, byte_dir: Path) -> None:
    flags = job(tmp_path, byte_dir, 800, dedup="exact", **talks(tmp_path, 800))
    writes = run({**flags, "shards_dir": str(tmp_path / "unbroken")}, 0)
    broken = {**flags, "shards_dir": str(tmp_path / "broken")}
    for share in (0.5, 0.1):
        assert run(broken, int(writes * share)) == -signal.SIGKILL
    assert len(list((tmp_path / "broken.partial" / "states").glob("*.json"))) > 1, "a shard was finished before"
    assert 0 < run(broken, 0) < 0.8 * writes, "it has not begun from the start"
    assert content(tmp_path / "broken") == content(tmp_path / "unbroken")
    assert len(list((tmp_path / "broken" / "train").glob("*.arrow"))) > 2
    assert not list(tmp_path.glob("broken.*partial*"))


def test_a_full_disk_keeps_what_is_done_and_the_next_attempt_goes_on(
    tmp_path: Path, byte_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it is that no longer fits: rows, a shard, the saved state, the tokenizer, the manifest."""
    monkeypatch.setattr(duplicates, "PART_ROWS", 1)
    monkeypatch.setattr(writer, "SHARD_ROWS", 128)
    flags = job(tmp_path, byte_dir, 700, dedup="exact")
    room = Room(monkeypatch)
    prepare(load("prepare", {**flags, "shards_dir": str(tmp_path / "unbroken")}))
    wanted, target = content(tmp_path / "unbroken"), tmp_path / "broken"
    writes = room.writes
    for first in (2, writes // 2, writes - 1):
        room.writes, room.most = 0, first
        with pytest.raises(UserError) as caught:
            prepare(load("prepare", {**flags, "shards_dir": str(target)}))
        assert f"{target}.partial" in str(caught.value) and not target.exists()
        room.writes, room.most = 0, 10**9
        prepare(load("prepare", {**flags, "shards_dir": str(target)}))
        assert room.writes < writes or first == 2, "it has begun from the start"
        assert content(target) == wanted
        shutil.rmtree(target)


class Room:
    """A disk that is full after a number of writes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.writes, self.most = 0, 10**9
        for place, name in ((ShardWriter, "_write"), (storage, "_sync"), (Path, "write_text"), (np, "save")):
            monkeypatch.setattr(place, name, self._limited(getattr(place, name)))

    def _limited(self, write: Any) -> Any:
        def limited(*arguments: Any, **named: Any) -> Any:
            self.writes += 1
            if self.writes == self.most:
                raise (
                    OSError(f"{self.writes} requested and 0 written") if self.most % 2 else OSError(ENOSPC, "No space")
                )
            return write(*arguments, **named)

        return limited


def interrupt_at(call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, plain = [0], Encoder.__call__

    def encode(self: Encoder, rows: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            raise KeyboardInterrupt
        return plain(self, rows)

    monkeypatch.setattr(Encoder, "__call__", encode)


def interrupted(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave an attempt that has finished two shards."""
    monkeypatch.setattr(writer, "SHARD_ROWS", 200)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_at(4, patch)
        prepare(config)


def test_a_damaged_state_is_passed_over_for_the_one_before(
    tmp_path: Path, byte_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = job(tmp_path, byte_dir, 1200)
    interrupted(load("prepare", flags), monkeypatch)
    *_, before, last = sorted((tmp_path / "shards.partial" / "states").glob("*.json"))
    assert before.name != "00000000.json"
    last.write_bytes(before.read_bytes())
    prepare(load("prepare", flags))
    prepare(load("prepare", {**flags, "shards_dir": str(tmp_path / "alone")}))
    assert content(tmp_path / "shards") == content(tmp_path / "alone")


@pytest.mark.parametrize("damage", [lambda path: os.truncate(path, 10), os.remove])
def test_rows_that_cannot_be_gone_back_to_are_told_and_made_anew(
    tmp_path: Path, byte_dir: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None]
) -> None:
    config = load("prepare", job(tmp_path, byte_dir, 1200))
    interrupted(config, monkeypatch)
    partial = tmp_path / "shards.partial"
    damage(next((partial / "train").glob("*.tmp")))
    with pytest.raises(UserError, match=f"{partial}: is damaged"):
        prepare(config)
    assert prepare(config).train_dir.parent == tmp_path / "shards"


def test_an_attempt_at_another_job_is_not_taken_over(
    tmp_path: Path, byte_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "SHARD_ROWS", 64)
    flags = job(tmp_path, byte_dir, 900)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_at(3, patch)
        prepare(load("prepare", flags))
    assert len(list((tmp_path / "shards.partial" / "states").glob("*.json"))) > 1
    prepare(load("prepare", {**flags, "max_seq_len": "48"}))
    prepare(load("prepare", {**flags, "max_seq_len": "48", "shards_dir": str(tmp_path / "alone")}))
    assert content(tmp_path / "shards") == content(tmp_path / "alone")


def test_the_number_of_processes_changes_nothing(
    tmp_path: Path, byte_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "SHARD_ROWS", 128)
    flags = job(tmp_path, byte_dir, 800, dedup="exact", clean="True", **talks(tmp_path, 800))
    prepare(load("prepare", {**flags, "shards_dir": str(tmp_path / "a")}))
    prepare(load("prepare", {**flags, "prepare_workers": "2", "shards_dir": str(tmp_path / "b")}))
    assert content(tmp_path / "a") == content(tmp_path / "b")
