"""Plans for the page, made in a child process, so that the page never imports what a plan needs.

`train_low_mem.py plan --json` answers in about a second. Where other runs are alive, what they may still take is set
aside first: each was planned with a peak, and holds less than that until it has come to its worst step.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import childproc
from board.runs import ALIVE
from language import spoken
from settings.declared import flags_of
from settings.fields import TRUE_WORDS
from settings.program import FILE, ROOT
from units import MIB

PROGRAM = (sys.executable, str(ROOT / FILE))
SECONDS = 60.0  # longest for one plan
KEPT, FRESH_SECONDS = 256, 5.0
Flags = Mapping[str, str]


@dataclass
class Planner:
    """Plans in child processes, two at a time, and remembers the answers for a moment.

    Args:
        folder: where relative paths of the flags begin.
    """

    folder: Path
    program: tuple[str, ...] = PROGRAM
    _seats: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(2))
    _known: OrderedDict[tuple[str, ...], tuple[float, dict[str, Any]]] = field(default_factory=OrderedDict)

    async def plan(self, flags: Flags, reserved_bytes: int = 0, fresh_seconds: float = FRESH_SECONDS) -> dict[str, Any]:
        """Plan a run beside others.

        Args:
            flags: of `train`, raw. reserved_bytes: what the others may still take.
        Returns:
            `plan` and what else `plan --json` says, such as what the run starts from (`start`), `available_bytes` with the others set aside, and `fits_now`; or
            `problems` and `exit_code`.
        """
        words = [*plan_words(flags), f"--language={spoken()}"]
        found = await self._ask(words, fresh_seconds)
        if "plan" not in found or reserved_bytes <= 0:
            return {**found, "fits_now": "plan" in found, "reserved_bytes": 0}
        # of memory of its own the others still take an unknown part: once they have, it is measured
        if found["machine"]["has_own_memory"]:
            return {**found, "fits_now": False, "reserved_bytes": reserved_bytes, "available_bytes": 0}
        available = int(found["machine"]["available_bytes"]) - reserved_bytes
        if int(found["plan"]["budget_bytes"]) > available:
            words = [word for word in words if not word.startswith("--memory_budget=")]
            beside = await self._ask([*words, f"--memory_budget={max(1, available // MIB)}M"], fresh_seconds)
            if "plan" not in beside:
                return {**found, "fits_now": False, "reserved_bytes": reserved_bytes, "available_bytes": available}
            found = beside
        return {**found, "fits_now": True, "reserved_bytes": reserved_bytes, "available_bytes": available}

    async def plans_of(self, flags: Flags, targets: list[str]) -> dict[str, Any]:
        """Plans of a model on several machines, by machine; what is told of named ones stays true for an hour."""
        words = [*words_of(flags), f"--target={','.join(targets)}", f"--language={spoken()}"]
        found = await self._ask(words, fresh_seconds=3600.0)
        kept = ("choice", "peak_bytes", "budget_bytes", "components", "seconds")
        told: dict[str, Any] = {}
        for target, one in zip(targets, found.get("list", [found] * len(targets)), strict=True):
            told[target] = {"plan": {name: one["plan"][name] for name in kept}} if "plan" in one else one
        return told

    async def _ask(self, words: list[str], fresh_seconds: float) -> dict[str, Any]:
        key = tuple(words)
        if key in self._known and time.monotonic() - self._known[key][0] <= fresh_seconds:
            return self._known[key][1]
        async with self._seats:
            answer = await self._child(words)
        self._known[key] = (time.monotonic(), answer)
        while len(self._known) > KEPT:
            self._known.popitem(last=False)
        return answer

    async def _child(self, words: list[str]) -> dict[str, Any]:
        argv = [*self.program, "plan", "--json=True", *words]
        done = await childproc.run_async(argv, SECONDS, cwd=self.folder)
        if done.returncode == 0:
            with suppress(ValueError):
                answer = json.loads(done.stdout)
                return {"list": answer} if isinstance(answer, list) else dict(answer)
        lines = done.stderr.strip().splitlines()
        return {"problems": [line.strip() for line in lines[1:]] or lines, "exit_code": done.returncode}


def plan_words(flags: Flags) -> list[str]:
    """The flags of a training run that its plan takes, as words of a command line."""
    taken = {*flags_of("plan"), "model_preset", "preset", "config"} - {"json", "target", "language"}
    kept = {name: value for name, value in flags.items() if name in taken}
    if not (goes_on(flags) or flags.get("train_file") or "preset" in flags):
        kept["preset"] = "sample"  # as `train` does
    return words_of(kept)


def goes_on(flags: Flags) -> bool:
    """Whether a run with these flags is one that is resumed."""
    return str(flags.get("is_keep_training", "")).strip().lower() in TRUE_WORDS


def words_of(flags: Flags) -> list[str]:
    """Flags as words of a command line. No shell ever reads them."""
    return [f"--{name}={value}" for name, value in flags.items()]


def still_to_take(runs: Iterable[Mapping[str, Any]]) -> int:
    """What runs that are alive may take beyond what they hold now, in bytes."""
    total = 0
    for run in runs:
        if run["state"] in ALIVE:
            peak = max(int(run.get("planned_peak_bytes") or 0), int(run.get("peak_bytes") or 0))
            total += max(0, peak - int(run.get("memory_bytes") or 0))
    return total
