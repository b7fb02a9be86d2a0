"""Speeds of this machine as they were measured: a small file, for estimates of time and for nothing else.

Idea: a speed is measured once and kept, with its date and how it was measured; `doctor` renews it, and that of a disk
also a run that has read and written enough of its weights there. No choice reads it: a file that is missing, old or
wrong changes what is told of the time, and nothing that is computed.
Source: XDG Base Directory Specification (XDG_CACHE_HOME).
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.storage import read_text, write_text

FOLDER, NAME = "frugalt5", "machine.json"
DISK_RATES = ("read", "write")
DISK_WAY = "one file written, flushed and read again, page cache left out"
RUN_WAY = "weights that a run wrote and read, page cache left out"
WAY = "square products of growing side, the best of several times"


@dataclass(frozen=True)
class Measured:
    """Speeds of one device.

    Args:
        processor: its name. threads: that the products used; 1 on a GPU.
        rates: dtype name -> FLOP/s of products with these threads; of a disk, "read" and "write" -> bytes a second.
        date: of the measurement. way: how it was measured.
    """

    processor: str
    threads: int
    rates: dict[str, float]
    date: str
    way: str = WAY

    def rates_with(self, threads: int) -> tuple[tuple[str, float], ...]:
        """The rates with another number of threads: in proportion."""
        return tuple((dtype, rate * threads / self.threads) for dtype, rate in self.rates.items())


def place(environ: Mapping[str, str] = os.environ) -> Path:
    """Where the file lies.

    Raises:
        OSError: the user has no home, as in some containers.
    """
    home = environ.get("XDG_CACHE_HOME")
    try:
        return (Path(home) if home else Path.home() / ".cache") / FOLDER / NAME
    except RuntimeError:
        raise OSError("this user has no home; give a folder with XDG_CACHE_HOME") from None


def key_of(device: str, processor: str, threads: int = 0) -> str:
    """The name of a device's entry: homes are shared between machines.

    Args:
        device: "cpu", "cuda" or "mps". processor: its name and, on a CPU, its class, which the environment may lower.
        threads: of a CPU, whose products do not take half the time with twice as many.
    """
    return f"{device}: {processor}" + (f", threads: {threads}" if threads else "")


def read(key: str) -> Measured | None:
    """What was measured; None where nothing was, or where the file is not what this module has written."""
    return _measured(_entries().get(key))


def of_cpu(processor: str, threads: int) -> Measured | None:
    """What was measured of a CPU with so many threads; else with another number of them; None: nothing was."""
    entries = _entries()
    others = [name for name in entries if name.startswith(key_of("cpu", processor))]
    return next(filter(None, map(_measured, map(entries.get, [key_of("cpu", processor, threads), *others]))), None)


def _entries() -> dict[str, Any]:
    try:
        return dict(json.loads(read_text(place())))
    except (OSError, ValueError, TypeError, RecursionError):
        return {}


def _measured(entry: Any) -> Measured | None:
    try:
        rates = {str(dtype): float(rate) for dtype, rate in entry["rates"].items()}
        processor, threads = str(entry["processor"]), int(entry["threads"])
        found = Measured(processor, threads, rates, str(entry["date"]), str(entry["way"]))
    except (ValueError, ArithmeticError, TypeError, KeyError, AttributeError):
        return None
    is_sound = threads > 0 and rates and all(0 < rate < math.inf for rate in rates.values())
    return found if is_sound else None


def disk_key(folder: Path) -> str:
    """The name of the entry of the disk that a folder lies on, or will lie on: by where it is mounted."""
    place = folder.absolute()
    while not os.path.ismount(place) and place != place.parent:
        place = place.parent
    return f"disk: {place}"


def disk_rates(folder: Path) -> tuple[float, float] | None:
    """Bytes a second that were last read from and written to a folder's disk; None: nobody has measured it."""
    found = read(disk_key(folder))
    if found is None or not found.rates.keys() >= set(DISK_RATES):
        return None
    return found.rates["read"], found.rates["write"]


def keep_disk(folder: Path, read_rate: float, write_rate: float, way: str = DISK_WAY) -> Measured:
    key = disk_key(folder)
    rates = dict(zip(DISK_RATES, (read_rate, write_rate), strict=True))
    return keep(key, key, 1, rates, way)


def keep(key: str, processor: str, threads: int, rates: Mapping[str, float], way: str = WAY) -> Measured:
    """Write what was measured now; where no file can be written, the next run measures again."""
    measured = Measured(processor, threads, dict(rates), time.strftime("%Y-%m-%d"), way)
    with suppress(OSError):
        path = place()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps({**_entries(), key: asdict(measured)}, indent=1) + "\n")
    return measured
