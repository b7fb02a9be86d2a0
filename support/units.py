"""Sizes read and shown, the only place that formats bytes: GiB means 1024^3, and only people see it."""

from __future__ import annotations

import math
import re

KIB = 1024
MIB = 1024**2
GIB = 1024**3
_FACTORS = {"": 1, "K": KIB, "M": MIB, "G": GIB, "T": 1024**4}
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([KMGT]?)(?:I?B)?\s*", re.IGNORECASE)


def parse_size(text: str | int | float) -> int:
    """Read a size as users write it: 6G, 512M, 1.5GiB, 6gb, or a number of bytes.

    Returns:
        bytes, at least 1.
    Raises:
        ValueError: not a size, or not positive.
    """
    if isinstance(text, bool):
        raise ValueError(f"not a size: {text!r}")
    match = _SIZE.fullmatch(str(text))
    if match is None:
        raise ValueError(f"not a size: {text!r}")
    size = int(float(match.group(1)) * _FACTORS[match.group(2).upper()])
    if size < 1:
        raise ValueError(f"not a positive size: {text!r}")
    return size


def format_size(size_bytes: float) -> str:
    """Show bytes as people read them: `1.25 GiB`, `96.0 MiB`, `512 B`."""
    size = abs(size_bytes)
    if size >= GIB:
        return f"{size_bytes / GIB:.2f} GiB"
    if size >= MIB:
        return f"{size_bytes / MIB:.1f} MiB"
    if size >= KIB:
        return f"{size_bytes / KIB:.1f} KiB"
    return f"{size_bytes:.0f} B"


def typed_size(size_bytes: float) -> str:
    """At least so many bytes as they are typed after a flag: `1300M`."""
    return f"{math.ceil(size_bytes / MIB)}M"
