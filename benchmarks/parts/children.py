"""Time and memory of a child process; every benchmark measures its systems this way.

Peak: anonymous memory of the whole process tree, sampled every 50 ms. VmHWM: the most that the child itself had
resident, pages of files included, as the kernel counts it; 0 where there is no /proc.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.page import ROOT
from memory.processes import ProcessTree

SAMPLE_SECONDS = 0.05
# Flags of a model that has every part and takes milliseconds a step; the vocabulary is the caller's.
TINY_BLOCKS = (
    "--d_model=32",
    "--d_kv=16",
    "--d_ff=64",
    "--num_heads=2",
    "--num_layers=1",
    "--num_decoder_layers=2",
)


@dataclass(frozen=True)
class Child:
    """How a child process went; `output` is what it printed, `messages` what it wrote to stderr.

    Args:
        marked_bytes: see `peak_of_process`.
    """

    returncode: int
    output: str
    messages: str
    seconds: float
    peak_bytes: int
    marked_bytes: int
    high_water_bytes: int

    @property
    def failure(self) -> str:
        """Why it ended badly, in a line; empty where it did not."""
        if not self.returncode:
            return ""
        if self.returncode == -9:
            return "killed, most likely for want of memory"
        last = [line for line in self.messages.strip().splitlines() if line.strip()][-1:]
        return last[0].strip()[:200] if last else f"exit code {self.returncode}"

    @property
    def figures(self) -> dict[str, Any]:
        """What it has measured: the JSON of the last line that it printed."""
        return dict(json.loads(self.output.strip().splitlines()[-1]))


def run(
    words: Sequence[str],
    cwd: Path = ROOT,
    environment: Mapping[str, str] | None = None,
    enter: Callable[[], None] | None = None,
    stop: Callable[[], bool] | None = None,
    said: str = "",
    beside: Callable[[int], None] | None = None,
    python: str = sys.executable,
) -> Child:
    """Run `python WORDS` and watch its memory until it ends.

    Args:
        words: what follows the name of the Python. cwd: where it runs; modules of the project are found anywhere.
        environment: added to this one's. enter: called in the child before Python starts, to limit it.
        stop: once it returns True, the child is killed. said: what it reads from standard input.
        beside: called with the process id in a thread of its own, such as a client of a server.
        python: another one, which does not find this project.
    """
    began, peak, marked, high_water = time.perf_counter(), 0, 0, 0
    path = str(ROOT) if python == sys.executable else ""
    environment = {**os.environ, "PYTHONPATH": path, **(environment or {})}
    with ExitStack() as opened:
        given, out, err = (opened.enter_context(tempfile.TemporaryFile("w+", encoding="utf8")) for _ in range(3))
        given.write(said)
        given.seek(0)
        child = subprocess.Popen(
            [python, *words], cwd=cwd, env=environment, stdin=given, stdout=out, stderr=err, preexec_fn=enter
        )
        if beside is not None:
            threading.Thread(target=beside, args=(child.pid,), daemon=True).start()
        tree = ProcessTree(child.pid)
        while child.poll() is None:
            held = tree.usage().anon_bytes
            peak = max(peak, held)
            marked = max(marked, peak_of_process(child.pid))
            high_water = max(high_water, status_bytes(child.pid).get("VmHWM", 0))
            if stop is not None and stop():
                child.kill()
            time.sleep(SAMPLE_SECONDS)
        out.seek(0), err.seek(0)
        seconds = time.perf_counter() - began
        return Child(child.returncode, out.read(), err.read(), seconds, peak, marked, high_water)


def must_run(words: Sequence[str], cwd: Path = ROOT, python: str = sys.executable) -> Child:
    """The same, but this program ends where the child fails."""
    child = run(words, cwd, python=python)
    if child.returncode:
        sys.exit(f"{' '.join(words[:3])} ended with {child.returncode}:\n{(child.output + child.messages)[-3000:]}")
    return child


def status_bytes(pid: int | str = "self") -> dict[str, int]:
    """What the kernel counts of a process, such as RssAnon, in bytes; empty where that is not told."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return {}
    return {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}


def peak_of_process(pid: int) -> int:
    """The most anonymous memory that a process has held so far by the kernel's own mark, in bytes; 0 once it is
    gone.
    """
    held = status_bytes(pid)
    return max(held["RssAnon"], held["VmHWM"] - held["RssFile"]) if "VmHWM" in held else 0


def options_of(arguments: Sequence[str], allowed: dict[str, str], about: str) -> tuple[list[str], dict[str, str]]:
    """Part a command line into words and --name=value options; ends the program with `about` where one is unknown.

    Args:
        allowed: name -> default.
    """
    words, options, others = options_and_flags(arguments, allowed)
    if {"help", "h"} & others.keys():
        print(about)
        sys.exit(0)
    if others:
        sys.exit(f"unknown: --{', --'.join(others)}; there are --{' --'.join(allowed)}")
    return words, options


def options_and_flags(
    arguments: Sequence[str], own: dict[str, str]
) -> tuple[list[str], dict[str, str], dict[str, str]]:
    """Part a command line into words, own --name=value options, and all others, which are for the program that is
    measured.

    Args:
        own: name -> default.
    """
    words = [word for word in arguments if not word.startswith("-")]
    given = dict(word.lstrip("-").partition("=")[::2] for word in arguments if word.startswith("-"))
    options = {name: given.pop(name, default) for name, default in own.items()}
    return words, options, given


def words_of(flags: Mapping[str, object]) -> list[str]:
    """Flags as words of a command line."""
    return [f"--{name}={value}" for name, value in flags.items()]
