"""Speeds of this machine as they were measured: a small file, for estimates of time and for nothing else.

Idea: a speed is measured once and kept, with its date; `doctor` renews it, and that of a disk also a run that has read
and written enough of its weights there. No choice reads it: a file that is missing, old or wrong changes what is told
of the time, and nothing that is computed.
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

from support.storage import read_text, write_text


@dataclass(frozen=True)
class Measured:
    """Speeds of one device.

    Args:
        processor: its name. threads: that the products used; 1 on a GPU.
        rates: dtype name -> FLOP/s of products with these threads; of a disk, "read" and "write" -> bytes a second.
        date: of the measurement.
    """

    processor: str
    threads: int
    rates: dict[str, float]
    date: str

    def rates_with(self, threads: int) -> tuple[tuple[str, float], ...]:
        """The rates with another number of threads: in proportion."""
        return tuple((dtype, rate * threads / self.threads) for dtype, rate in self.rates.items())


def location(environ: Mapping[str, str] = os.environ) -> Path:
    """Path of the file.

    Raises:
        OSError: the user has no home, as in some containers.
    """
    cache = environ.get("XDG_CACHE_HOME")
    try:
        folder = Path(cache) if cache else Path.home() / ".cache"
    except RuntimeError:
        raise OSError("this user has no home; give a folder with XDG_CACHE_HOME") from None
    return folder / "frugalt5" / "machine.json"


def key_of(device: str, processor: str, threads: int = 0) -> str:
    """The name of a device's entry: homes are shared between machines.

    Args:
        device: "cpu", "cuda" or "mps". processor: its name and, on a CPU, its class, which the environment may lower.
        threads: of a CPU, whose products do not take half the time with twice as many.
    """
    return f"{device}: {processor}" + (f", threads: {threads}" if threads else "")


def read(key: str) -> Measured | None:
    """What was measured; None where nothing was, or where the file is not what this module has written."""
    try:
        entry = _entries()[key]
        rates = {str(dtype): float(rate) for dtype, rate in entry["rates"].items()}
        measured = Measured(str(entry["processor"]), int(entry["threads"]), rates, str(entry["date"]))
    except (ValueError, ArithmeticError, TypeError, LookupError, AttributeError):
        return None
    is_sound = measured.threads > 0 and rates and all(0 < rate < math.inf for rate in rates.values())
    return measured if is_sound else None


def of_cpu(processor: str, threads: int) -> Measured | None:
    """What was measured of a CPU with so many threads; else with another number of them; None: nothing was."""
    exact = key_of("cpu", processor, threads)
    similar = [key for key in _entries() if key.startswith(key_of("cpu", processor))]
    return next(filter(None, map(read, [exact, *similar])), None)


def _entries() -> dict[str, Any]:
    try:
        return dict(json.loads(read_text(location())))
    except (OSError, ValueError, TypeError, RecursionError):
        return {}


def disk_key(folder: Path) -> str:
    """The name of the entry of the disk that a folder lies on, or will lie on: by where it is mounted."""
    mount = folder.absolute()
    while not os.path.ismount(mount) and mount != mount.parent:
        mount = mount.parent
    return f"disk: {mount}"


def disk_rates(folder: Path) -> tuple[float, float] | None:
    """Bytes a second that were last read from and written to a folder's disk; None: nobody has measured it."""
    measured = read(disk_key(folder))
    if measured is None or not measured.rates.keys() >= {"read", "write"}:
        return None
    return measured.rates["read"], measured.rates["write"]


def keep_disk(folder: Path, read_rate: float, write_rate: float) -> Measured:
    """Write how fast a folder's disk is, in bytes a second."""
    key = disk_key(folder)
    return keep(key, key, 1, {"read": read_rate, "write": write_rate})


def keep(key: str, processor: str, threads: int, rates: Mapping[str, float]) -> Measured:
    """Write what was measured now; where no file can be written, the next run measures again."""
    measured = Measured(processor, threads, dict(rates), time.strftime("%Y-%m-%d"))
    with suppress(OSError):
        path = location()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps({**_entries(), key: asdict(measured)}, indent=1) + "\n")
    return measured
