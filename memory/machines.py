"""Which machine is planned for: this one, looked at without torch, or another one by name or file?"""

from __future__ import annotations

import difflib
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from config import UserError
from memory.budget import host_limits, margin_of
from memory.prediction import BASE_BYTES, Machine
from memory.units import parse_size
from precedence import PRESETS_DIR
from settings import AUTO, read_settings_file

MACHINES_FILE = PRESETS_DIR / "machines.yaml"
MEASURED_SIDE = 768  # of the product that measures the rate: large enough for full speed, a few milliseconds
BF16_UNITS = {"amx_bf16": 8.0, "avx512_bf16": 2.0}  # processor flag -> speed of bf16 products in units of fp32
NO_BF16_UNITS = 0.01


def this_machine(budget: int | str = AUTO) -> Machine:
    """This machine's memory and speed, in a fraction of a second and without torch; its CPU, also where it has a GPU.

    Args:
        budget: `memory_budget`.
    """
    lowest = min(limit.bytes for limit in host_limits())
    offered = lowest - margin_of(lowest)
    taken = offered if budget == AUTO else min(int(budget), offered)
    rate = _product_rate()
    return Machine(taken, lowest, BASE_BYTES, (("float32", rate), ("bfloat16", rate * _bf16_factor())))


def target_machine(name: str, budget: int | str = AUTO) -> Machine:
    """A machine that is not here.

    Args:
        name: an entry of presets/machines.yaml, or a YAML file with the same fields.
    Raises:
        UserError: no such machine, or a field is missing or wrong.
    """
    known = read_settings_file(MACHINES_FILE)
    about: Mapping[str, Any] | None = known.get(name)
    if about is None and Path(name).is_file():
        about = read_settings_file(Path(name))
    if about is None:
        close = difflib.get_close_matches(name, known, n=1)
        near = f"; did you mean {close[0]}?" if close else ""
        raise UserError(
            f"--target = {name}, is no file and not known{near}; allowed: {', '.join(known)} or a YAML file"
        )
    try:
        available, base = parse_size(about["available"]), parse_size(about["base"]) if about["base"] else 0
        rates = tuple((dtype, float(about["rates"][dtype])) for dtype in ("float32", "bfloat16"))
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"--target = {name}, {error} is missing or wrong; needed: available and base (sizes), rates (float32 and bfloat16, FLOP/s)"
        ) from None
    taken = available if budget == AUTO else min(int(budget), available)
    return Machine(taken, available, base, rates)


def _product_rate() -> float:
    """FLOP/s of an fp32 product."""
    import numpy as np

    square = np.ones((MEASURED_SIDE, MEASURED_SIDE), np.float32)
    seconds = []
    for _ in range(4):  # the first also starts the threads
        began = time.perf_counter()
        square @ square
        seconds.append(time.perf_counter() - began)
    return 2 * MEASURED_SIDE**3 / min(seconds)


def _bf16_factor() -> float:
    cpuinfo = Path("/proc/cpuinfo")
    flags = re.search(r"^flags\s*:(.*)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else None
    words = flags.group(1).split() if flags else []
    return max((factor for flag, factor in BF16_UNITS.items() if flag in words), default=NO_BF16_UNITS)
