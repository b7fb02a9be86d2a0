"""Mutated copies of files, opened in a child process, where a crash can be seen.

Each kind of file has a maker, which writes a sound one, and a reader, which takes all of it. Of every mutated copy the
child writes down what came of it: read (the damage does no harm), told (a UserError), or the traceback of anything
else; a child that dies is noted with the number of the copy, and the next one continues after it. Copy number N of a
kind is the same in every run.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.page import ROOT

CHILD = ROOT / "benchmarks" / "fuzzing" / "child.py"
CRASH_NOTE = "died"


@dataclass
class Outcome:
    """What became of the mutated copies of one kind of file."""

    read: int = 0
    told: int = 0
    bad: list[str] = field(default_factory=list)  # crashes, tracebacks and messages that name no file

    @property
    def copies(self) -> int:
        return self.read + self.told + len(self.bad)

    def __add__(self, other: Outcome) -> Outcome:
        return Outcome(self.read + other.read, self.told + other.told, self.bad + other.bad)

    def __str__(self) -> str:
        return f"{self.copies} copies: {self.read} read, {self.told} told, {len(self.bad)} bad"


def mutated(content: bytes, name: str, number: int) -> bytes:
    """Copy number `number` of a file; the first is sound, and of JSON every second one stays JSON."""
    draw = random.Random(f"{name} {number}")
    if not number:
        return content
    if name.endswith(("json", "yaml")) and number % 50 == 49:
        return deepened(content, draw)
    if number % 2 and content[:1] == b"{" and name.endswith(("json", "yaml")):
        return mutate_json(content, draw)
    return mutate(content, draw)


def mutate(content: bytes, draw: random.Random) -> bytes:
    """Damage a file as disks, transfers and strangers do: bits, bytes, lengths, cuts, doubled and moved pieces."""
    damaged = bytearray(content)
    for _ in range(draw.choice((1, 1, 1, 2, 4, 16))):
        size = len(damaged)
        if not size:
            break
        at = draw.randrange(size)
        how = draw.randrange(8)
        if how == 0:
            damaged[at] ^= 1 << draw.randrange(8)
        elif how == 1:
            damaged[at] = draw.randrange(256)
        elif how == 2:
            word = draw.choice((-1, 0, 1, 2**31 - 1, -(2**31), 2**16, draw.randrange(2**31)))
            damaged[at : at + 4] = word.to_bytes(4, "little", signed=True)
        elif how == 3:
            word = draw.choice((-1, 2**63 - 1, -(2**63), 2**40, draw.randrange(2**62)))
            damaged[at : at + 8] = word.to_bytes(8, "little", signed=True)
        elif how == 4:
            del damaged[at:]
        elif how == 5:
            del damaged[at : at + draw.randrange(1, 32)]
        elif how == 6:
            damaged[at:at] = damaged[draw.randrange(size) :][: draw.randrange(1, 64)]
        else:
            end = at + draw.randrange(1, 256)
            damaged[at:end] = draw.choice((b"\0", b"\xff", b"\x1b", b"[", b'"', b"9")) * (min(end, size) - at)
    return bytes(damaged)


def deepened(content: bytes, draw: random.Random) -> bytes:
    """Nest brackets in a file, closed or not, deeper than any parser's stack."""
    at = draw.choice([0, *(place + 1 for place, byte in enumerate(content) if byte in b":,[")])
    depth = draw.choice((900, 20_000, 10**6))
    inside = draw.choice((b"[", b'{"a":')) * depth + draw.choice((b"", b"]" * depth))
    return content[:at] + inside + content[at:]


def mutate_json(content: bytes, draw: random.Random) -> bytes:
    """Damage what JSON says and leave it JSON: other types, absurd numbers, missing, doubled and renamed entries."""
    value = json.loads(content)
    for _ in range(draw.choice((1, 1, 2, 4))):
        holders = [node for node in _nodes(value) if isinstance(node, (dict, list)) and node]
        if not holders:
            break
        holder = draw.choice(holders)
        key = draw.choice(list(holder)) if isinstance(holder, dict) else draw.randrange(len(holder))
        how = draw.randrange(6)
        if how == 0:
            del holder[key]
        elif how == 1 and isinstance(holder, dict):
            holder[draw.choice(("", "\x1b[2J", f"{key}x", "type"))] = holder.pop(key)
        elif how == 2:
            holder[key] = deepcopy(draw.choice(list(_nodes(value))))
        else:
            holder[key] = deepcopy(draw.choice(STRANGE))
    return json.dumps(value).encode()


STRANGE: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**63,
    -(2**70),
    1e308,
    0.5,
    float("nan"),
    float("inf"),
    "",
    "x",
    "\0",
    "\x1b]0;x\x07",
    "(",
    "(a+)+$",
    "[[:alpha:]",
    "\\p{L",
    "x" * 3000,
    "\ud800",
    [],
    {},
    [[]],
    [None],
    {"a": {}},
    ["x", "y"],
    [1, 2],
    "9" * 5000,
]


def _nodes(value: Any) -> Iterator[Any]:
    yield value
    for member in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _nodes(member)


def survey(kind: str, folder: Path, numbers: range) -> Outcome:
    """Open mutated copies of one kind of file.

    Args:
        kind: a key of `child.KINDS`. folder: an empty one. numbers: which copies.
    """
    outcome, notes, first = Outcome(), folder / "notes.jsonl", numbers.start
    while first < numbers.stop:
        notes.write_text("")
        command = [sys.executable, str(CHILD), kind, str(folder), str(first), str(numbers.stop)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, stdin=subprocess.DEVNULL)
        lines = [json.loads(line) for line in notes.read_text(encoding="utf8").splitlines()]
        for number, what in lines:
            if what in ("read", "told"):
                setattr(outcome, what, getattr(outcome, what) + 1)
            elif what != "begun":
                outcome.bad.append(f"{kind} {number}: {what}")
        if done.returncode == 0:
            break
        assert lines, done.stderr.decode("utf8", "replace")  # the sound file could not be made
        last, what = lines[-1]
        if what == "begun":
            reason = " ".join(done.stderr.decode("utf8", "replace").split())[-300:]
            outcome.bad.append(f"{kind} {last}: {CRASH_NOTE}, exit code {done.returncode}: {reason}")
        first = last + 1
    return outcome
