"""A process that ends, or a disk that fails, at each change of the disk.

Every call of `os` that changes names, and fsync, is counted; what goes wrong at which of them is a `Fault`. A run that
is to be killed at random has its moment drawn inside a named function, by the processor time spent in it: a machine
that is busy or stopped for a while does not move it.

After a loss of power two worlds are possible, and both are made: names are on the disk and contents that nobody waited
for are not (files become empty), or renames that nobody waited for are undone as well.

Source: T. S. Pillai et al. 2014, "All File Systems Are Not Created Equal" (OSDI), section 3.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import shutil
import signal
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

CHANGES = ("replace", "rename", "fsync", "unlink", "remove", "rmdir", "symlink", "link", "mkdir")
VARIABLE = "FRUGALT5_FAULT"  # the environment of children that are started anew
Call = Callable[..., Any]


@dataclass(frozen=True)
class Fault:
    """What goes wrong with a process.

    Args:
        kind: trace (nothing; each change goes into `log`, and the disk before and after it), kill (SIGKILL), error (the
            call fails), power (see the module).
        at: number of the change. is_after: after it, not before. error: number of the failure; from then on all fail.
        function: `module:name`, during whose call `call` the process ends after `seconds` of processor time.
        log: file for what was counted. rank: of the process that is meant, where several run; None: whichever reads
            this.
        below: the folder whose state is traced, or that loses power.
        undoes: whether a loss of power undoes what was renamed or made and not waited for.
    """

    kind: str
    at: int = -1
    is_after: bool = False
    error: int = 0
    function: str = ""
    call: int = 0
    seconds: float = 0.0
    log: str = ""
    rank: str | None = None
    below: str = ""
    undoes: bool = False

    def text(self) -> str:
        """For the environment of a child."""
        return json.dumps(asdict(self))


def start(fault: Fault) -> None:
    """Let it happen to this process."""
    if fault.rank is not None and os.environ.get("RANK") != fault.rank:
        return
    if fault.function:
        _around(fault.function, _Timer(fault).run)
    elif fault.kind == "power":
        watch_changes(PowerLoss(fault).change)
    else:
        watch_changes(_Counter(fault).change)


def watch_changes(around: Callable[[str, Call, tuple[Any, ...], dict[str, Any]], Any]) -> None:
    """Let every change of the disk by this process pass through `around(name, plain, arguments, named)`."""
    for name in CHANGES:
        plain = getattr(os, name)
        setattr(os, name, functools.partial(around, name, plain))


def _end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class _Counter:
    def __init__(self, fault: Fault) -> None:
        self.fault, self.count = fault, -1

    def change(self, name: str, plain: Call, *arguments: Any, **named: Any) -> Any:
        fault = self.fault
        self.count += 1
        if fault.kind == "trace":
            return self._traced(name, plain, *arguments, **named)
        is_here = self.count == fault.at
        if fault.kind == "kill" and is_here and not fault.is_after:
            _end()
        if fault.kind == "error" and self.count >= fault.at:
            raise OSError(fault.error, os.strerror(fault.error), str(arguments[0]))
        try:
            return plain(*arguments, **named)
        finally:
            if fault.kind == "kill" and is_here:
                _end()

    def _traced(self, name: str, plain: Call, *arguments: Any, **named: Any) -> Any:
        before = state_of(self.fault.below)
        try:
            return plain(*arguments, **named)
        finally:
            words = " ".join(str(word) for word in arguments)
            _log(
                self.fault.log,
                json.dumps({"change": f"{name} {words}", "states": [before, state_of(self.fault.below)]}),
            )


class PowerLoss:
    """What was waited for, and the disk after the power is gone after change `at`."""

    def __init__(self, fault: Fault) -> None:
        self.fault, self.count = fault, -1
        self.synced: dict[tuple[int, int], tuple[int, int]] = {}  # file -> size and time when it was waited for
        self.renames: list[tuple[str, str, str | None]] = []  # from (none: made), to, and what was there
        for path in _files(fault.below):  # what was there before is on the disk
            self._note(os.stat(path, follow_symlinks=False))

    def change(self, name: str, plain: Call, *arguments: Any, **named: Any) -> Any:
        self.count += 1
        aside = self._aside(arguments) if name in ("replace", "rename") and self.fault.undoes else None
        try:
            result = plain(*arguments, **named)
            self._keep(name, arguments, named, aside)
            return result
        finally:
            if self.count == self.fault.at:
                self.lose(self.fault.below)
                _end()

    def _keep(self, name: str, arguments: tuple[Any, ...], named: dict[str, Any], aside: str | None) -> None:
        """Note what a change that has been made puts on the disk, or has not put there yet."""
        if name == "fsync":
            self._note(os.fstat(arguments[0]))
            folder = os.readlink(f"/proc/self/fd/{arguments[0]}")
            self.renames = [entry for entry in self.renames if os.path.dirname(entry[1]) != folder]
        elif name in ("replace", "rename"):
            source, target = (os.path.abspath(os.fspath(path)) for path in arguments[:2])
            self.renames.append((source, target, aside))
        elif name == "mkdir" and "dir_fd" not in named:
            self.renames.append(("", os.path.abspath(os.fspath(arguments[0])), None))

    def _aside(self, arguments: tuple[Any, ...]) -> str | None:
        """Another name for the file that a rename replaces, so that it can come back."""
        target = os.fspath(arguments[1])
        if os.path.isdir(target) or not os.path.lexists(target):
            return None
        aside = f"{self.fault.log}.{self.count}"
        _PLAIN["link"](target, aside, follow_symlinks=False)
        return aside

    def lose(self, disk: str) -> None:
        """Make the disk, or a copy of it, what the power leaves of it."""

        def there(path: str) -> str:
            return os.path.join(disk, os.path.relpath(path, self.fault.below))

        for path in filter(self._is_lost, _files(self.fault.below)):
            os.truncate(there(path), 0)
        for source, target, aside in reversed(self.renames) if self.fault.undoes else ():
            with suppress(OSError):  # it was renamed further, or removed
                if not source:
                    shutil.rmtree(there(target))
                    continue
                _PLAIN["replace"](there(target), there(source))
                if aside is not None and self._is_lost(aside):
                    open(there(target), "w").close()
                elif aside is not None:
                    shutil.copyfile(aside, there(target), follow_symlinks=False)

    def _is_lost(self, path: str) -> bool:
        facts = os.stat(path, follow_symlinks=False)
        is_link = os.path.islink(path)
        return not is_link and self.synced.get((facts.st_dev, facts.st_ino)) != (facts.st_size, facts.st_mtime_ns)

    def _note(self, facts: os.stat_result) -> None:
        self.synced[facts.st_dev, facts.st_ino] = facts.st_size, facts.st_mtime_ns


def state_of(folder: str) -> int:
    """A number that differs where names or contents below a folder differ."""
    found = 0
    for base, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted([*folders, *names]):
            path = os.path.join(base, name)
            found = zlib.crc32(os.readlink(path).encode() if os.path.islink(path) else path.encode(), found)
            if os.path.isfile(path) and not os.path.islink(path):
                with open(path, "rb") as file:
                    found = zlib.crc32(file.read(), found)
    return found


_PLAIN = {name: getattr(os, name) for name in CHANGES}


def _files(folder: str) -> list[str]:
    found = (os.path.join(base, name) for base, _, names in os.walk(folder) for name in names)
    return [path for path in found if os.path.isfile(path) and not os.path.islink(path)]


class _Timer:
    """Ends the process inside a call of a function; in a trace, tells how long each call took."""

    def __init__(self, fault: Fault) -> None:
        self.fault, self.count = fault, -1

    def run(self, plain: Call, *arguments: Any, **named: Any) -> Any:
        self.count += 1
        if self.fault.kind == "trace":
            began = time.process_time()
            try:
                return plain(*arguments, **named)
            finally:
                _log(self.fault.log, f"{time.process_time() - began:.6f}")
        if self.count == self.fault.call:
            signal.signal(signal.SIGPROF, signal.SIG_DFL)  # which ends a process on the spot, as SIGKILL does
            signal.setitimer(signal.ITIMER_PROF, max(self.fault.seconds, 1e-5))
        return plain(*arguments, **named)


def _around(place: str, around: Call) -> None:
    """Let calls of `module:name` or `module:Class.name` pass through `around(plain, ...)`."""
    module_name, _, name = place.partition(":")
    owner: Any = importlib.import_module(module_name)
    *classes, last = name.split(".")
    for part in classes:
        owner = getattr(owner, part)
    plain = getattr(owner, last)

    @functools.wraps(plain)
    def call(*arguments: Any, **named: Any) -> Any:
        return around(plain, *arguments, **named)

    setattr(owner, last, call)


def _log(path: str, line: str) -> None:
    with open(path, "a", encoding="utf8") as file:
        file.write(line + "\n")


def start_as_told() -> None:
    """Read the environment, in children that are started anew."""
    text = os.environ.get(VARIABLE)
    if text:
        start(Fault(**json.loads(text)))
