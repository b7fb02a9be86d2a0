"""Plans for the page, made in a child process, so that the page never imports what a plan needs.

`train_low_mem.py plan --json` answers in about a second. Where other runs are alive, what they may still take is set
aside first: each was planned with a peak, and holds less than that until it has come to its worst step.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from board.runs import ALIVE
from settings.declared import flags_of
from settings.fields import TRUE_WORDS
from settings.program import start_command
from support import child_process
from support.language import spoken
from support.units import MIB

PROGRAM = tuple(start_command())
PLAN_SECONDS = 60.0
PLANS_AT_ONCE = 2
KEPT_PLANS = 256
FRESH_SECONDS = 5.0
TARGET_FRESH_SECONDS = 3600.0  # The plan for a named machine does not change.
Flags = Mapping[str, str]
# The page shows this of a plan for another machine:
TARGET_KEYS = ("choice", "peak_bytes", "budget_bytes", "components", "seconds")


@dataclass
class Planner:
    """Plans in child processes and remembers the answers for a moment.

    Args:
        folder: where relative paths of the flags begin.
    """

    folder: Path
    program: tuple[str, ...] = PROGRAM
    _seats: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(PLANS_AT_ONCE))
    # The answers by the words that were asked, each with its time, the oldest first.
    _answers: dict[tuple[str, ...], tuple[float, Any]] = field(default_factory=dict)

    async def plan(self, flags: Flags, reserved_bytes: int = 0, fresh_seconds: float = FRESH_SECONDS) -> dict[str, Any]:
        """Plan a run beside others.

        Args:
            flags: of `train`, raw. reserved_bytes: what the others may still take.
        Returns:
            `plan` and what else `plan --json` says, such as what the run starts from (`start`), `available_bytes` with
            the others set aside, and `fits_now`; or `problems` and `exit_code`.
        """
        words = [*plan_words(flags), f"--language={spoken()}"]
        alone = await self._ask(words, fresh_seconds)
        if "plan" not in alone or not reserved_bytes:
            return {**alone, "fits_now": "plan" in alone, "reserved_bytes": 0}
        available = int(alone["machine"]["available_bytes"]) - reserved_bytes
        if alone["machine"]["has_own_memory"]:  # It is not known which part of it the others will take.
            available = 0
        beside = alone
        if int(alone["plan"]["budget_bytes"]) > available:
            words = [word for word in words if not word.startswith("--memory_budget=")]
            beside = await self._ask([*words, f"--memory_budget={max(1, available // MIB)}M"], fresh_seconds)
        fits = "plan" in beside and available > 0
        plan = beside if fits else alone
        return {**plan, "fits_now": fits, "reserved_bytes": reserved_bytes, "available_bytes": available}

    async def plans_of(self, flags: Flags, targets: list[str]) -> dict[str, Any]:
        """Plans of a model on several machines, by machine."""
        words = [*words_of(flags), f"--target={','.join(targets)}", f"--language={spoken()}"]
        answer = await self._ask(words, TARGET_FRESH_SECONDS)
        plans = answer if isinstance(answer, list) else [answer] * len(targets)  # One refusal is of all.
        for plan in plans:
            if "plan" in plan:
                plan["plan"] = {name: plan["plan"][name] for name in TARGET_KEYS}
        return dict(zip(targets, plans, strict=True))

    async def _ask(self, words: list[str], fresh_seconds: float) -> Any:
        """What `plan --json` says: a table, or a list of them; or `problems` and `exit_code`."""
        key = tuple(words)
        answered, answer = self._answers.pop(key, (-math.inf, None))
        if time.monotonic() - answered > fresh_seconds:
            async with self._seats:
                argv = [*self.program, "plan", "--json=True", *words]
                done = await child_process.run_async(argv, PLAN_SECONDS, cwd=self.folder)
            answered = time.monotonic()
            if done.returncode == 0:
                answer = json.loads(done.stdout)
            else:
                lines = [line.strip() for line in done.stderr.strip().splitlines()]
                answer = {"problems": lines[1:] or lines, "exit_code": done.returncode}
        self._answers[key] = (answered, answer)
        if len(self._answers) > KEPT_PLANS:
            self._answers.pop(next(iter(self._answers)))
        return answer


def plan_words(flags: Flags) -> list[str]:
    """The flags of a training run that its plan takes, as words of a command line."""
    names = {*flags_of("plan"), "model_preset", "preset", "config"} - {"json", "target", "language"}
    plan_flags = {name: value for name, value in flags.items() if name in names}
    if not (goes_on(flags) or flags.get("train_file") or "preset" in flags):
        plan_flags["preset"] = "sample"  # `train` takes it too.
    return words_of(plan_flags)


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
            planned, peak, memory = (run[name] or 0 for name in ("planned_peak_bytes", "peak_bytes", "memory_bytes"))
            total += max(0, planned - memory, peak - memory)
    return total
