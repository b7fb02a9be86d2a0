"""A preparing that is killed continues where it stopped, and nobody can tell from the shards."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from errno import ENOSPC
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import storage
from config import load
from data.prepare import encoding
from data.prepare.child import ROOT
from data.prepare.preparing import prepare
from data.prepare.spool import Spool
from data.shards import checksums
from data.text import duplicates
from settings.errors import UserError

# Runs `prepare` and kills itself at the n-th call of any function; writes how many calls an unbroken run makes.
PREPARING = """
import json, os, signal, sys
from config import load
from data.prepare import encoding, preparing as prepare
from data.text import duplicates
flags, kill_at, counted = json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
encoding.CHECKPOINT_SECONDS = duplicates.SAVE_SECONDS = 0.01
config = load("prepare", flags)
calls = 0
def count(frame, event, argument):
    global calls
    calls += 1
    if calls == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
sys.setprofile(count)
prepare.prepare(config)
sys.setprofile(None)
with open(counted, "w") as file:
    file.write(str(calls))
"""


def corpus(path: Path, rows: int) -> Path:
    draw = random.Random(0)
    words = [str(number) for number in range(300)]
    with path.open("w", encoding="utf8") as file:
        for row in range(rows):
            text = " ".join(draw.choices(words, k=draw.randrange(1, 120))) if row % 10 else "the same each time"
            broken = row % 97 == 5
            file.write(
                "{broken\n" if broken else json.dumps({"prompt": f"{row % 10 and row} {text}", "response": text}) + "\n"
            )
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


def run(flags: dict[str, str], kill_at: int, counted: Path) -> int:
    command = [sys.executable, "-c", PREPARING, json.dumps(flags), str(kill_at), str(counted)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode


def job(folder: Path, tokenizer: Path, rows: int, **more: str) -> dict[str, str]:
    """The flags of a preparing of so many rows; `more` replaces some."""
    return {
        "train_file": str(corpus(folder / "a.jsonl", rows)), "tokenizer_dir": str(tokenizer), "skip_bad_rows": "True",
        "cache_dir": str(folder / "cache"), "shards_dir": str(folder / "shards"), **more,
    }  # fmt: skip


def content(folder: Path) -> dict[str, str]:
    """Digest of every file, without the manifest's mention of nothing but names."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize(
    "kills, rows, more",
    [
        (5, 1500, {"dedup": "exact"}),
        (4, 1500, {"dedup": "near", "expand_turns": "True"}),
        pytest.param(20, 6000, {"dedup": "near", "clean": "True"}, marks=pytest.mark.slow),
        pytest.param(
            20, 6000, {"objective": "span", "text_column": "response", "prepare_workers": "2"}, marks=pytest.mark.slow
        ),
    ],
)
def test_a_killed_preparing_ends_with_the_same_bytes(
    tmp_path: Path, byte_dir: Path, kills: int, rows: int, more: dict[str, str]
) -> None:
    sizes = {"shard_rows": "256", "max_seq_len": "64", "prepare_workers": "0"}
    talking = talks(tmp_path, rows) if "expand_turns" in more else {}
    flags = job(tmp_path, byte_dir, rows, **{**sizes, **more, **talking})
    counted = tmp_path / "calls"
    assert run({**flags, "shards_dir": str(tmp_path / "unbroken")}, 0, counted) == 0
    calls = int(counted.read_text())
    draw, killed = random.Random(1), 0
    broken = {**flags, "shards_dir": str(tmp_path / "broken")}
    while killed < kills:
        code = run(broken, draw.randrange(1, calls * 2 // kills), counted)
        if code == 0:  # came through between two kills: begin anew, so that all kills are counted
            break
        assert code == -signal.SIGKILL
        killed += 1
    assert killed >= min(kills, 4)
    assert run(broken, 0, counted) == 0
    assert content(tmp_path / "broken") == content(tmp_path / "unbroken")
    assert len(list((tmp_path / "broken" / "train").glob("*.arrow"))) > 2
    assert not list(tmp_path.glob("broken.*partial*"))


@pytest.mark.parametrize("dedup", ["none", "exact"])
def test_a_full_disk_keeps_what_is_done_and_the_next_attempt_goes_on(
    tmp_path: Path, byte_dir: Path, monkeypatch: pytest.MonkeyPatch, dedup: str
) -> None:
    """Whatever it is that no longer fits: rows, a shard, the saved state, the tokenizer, the manifest."""
    monkeypatch.setattr(encoding, "CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(duplicates, "SAVE_SECONDS", 0.0)
    flags = job(tmp_path, byte_dir, 700, shard_rows="128", max_seq_len="64", dedup=dedup)
    room = Room(monkeypatch)
    prepare(load("prepare", {**flags, "shards_dir": str(tmp_path / "unbroken")}))
    wanted, target = content(tmp_path / "unbroken"), tmp_path / "broken"
    writes = room.writes
    for first in (2, writes // 3, writes // 2, writes - 9, writes - 4, writes):
        room.writes, room.most = 0, first
        with pytest.raises(UserError, match="the disk is full") as caught:
            prepare(load("prepare", {**flags, "shards_dir": str(target)}))
        assert f"kept in {target}.partial" in str(caught.value) and not target.exists()
        room.writes, room.most = 0, 10**9
        prepare(load("prepare", {**flags, "shards_dir": str(target)}))
        assert room.writes < writes or first == 2, "it has begun from the start"
        assert content(target) == wanted
        shutil.rmtree(target)


class Room:
    """A disk that is full after a number of writes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.writes, self.most = 0, 10**9
        for place, name in (
            (Spool, "_append"), (checksums.SummedFile, "write"), (storage, "_sync"), (encoding.json, "dump"),
            (Path, "write_text"), (np, "save"),
        ):  # fmt: skip
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


def test_a_state_that_cannot_be_gone_back_to_is_told_and_made_anew(tmp_path: Path, byte_dir: Path) -> None:
    flags = job(tmp_path, byte_dir, 600, prepare_workers="0")
    counted = tmp_path / "calls"
    assert run({**flags, "shards_dir": str(tmp_path / "other")}, 0, counted) == 0
    for damage in ("state", "spool"):
        assert run(flags, int(counted.read_text()) * 4 // 5, counted) == -signal.SIGKILL
        partial = tmp_path / "shards.partial"
        if damage == "state":
            (partial / "progress.json").write_text('{"splits": 3}')
        else:
            os.truncate(next((partial / "train").glob(".*.ids")), 10)
        with pytest.raises(UserError, match=r"run the command again, it starts over"):
            prepare(load("prepare", flags))
        assert not partial.exists()


def test_an_attempt_at_another_job_is_not_taken_over(tmp_path: Path, byte_dir: Path) -> None:
    flags = job(tmp_path, byte_dir, 600, shard_rows="64")
    counted = tmp_path / "calls"
    assert run({**flags, "max_seq_len": "32", "shards_dir": str(tmp_path / "other")}, 0, counted) == 0
    assert run({**flags, "max_seq_len": "32"}, int(counted.read_text()) * 2 // 3, counted) == -signal.SIGKILL
    assert (tmp_path / "shards.partial").is_dir()
    assert run({**flags, "max_seq_len": "48"}, 0, counted) == 0
    assert run({**flags, "max_seq_len": "48", "shards_dir": str(tmp_path / "alone")}, 0, counted) == 0
    assert content(tmp_path / "shards") == content(tmp_path / "alone")


@pytest.mark.parametrize("workers, expands", [(2, False), (2, True), pytest.param(3, False, marks=pytest.mark.slow)])
def test_the_number_of_processes_changes_nothing(tmp_path: Path, byte_dir: Path, workers: int, expands: bool) -> None:
    talking = talks(tmp_path, 800) if expands else {}
    flags = job(tmp_path, byte_dir, 800, shard_rows="128", dedup="exact", clean="True", **talking)
    counted = tmp_path / "calls"
    assert run({**flags, "prepare_workers": "0", "shards_dir": str(tmp_path / "a")}, 0, counted) == 0
    assert run({**flags, "prepare_workers": str(workers), "shards_dir": str(tmp_path / "b")}, 0, counted) == 0
    assert content(tmp_path / "a") == content(tmp_path / "b")
