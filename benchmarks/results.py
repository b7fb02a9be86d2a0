"""Where do measured figures go? Into docs/benchmarks.md, each benchmark in its own section, with date and machine."""

from __future__ import annotations

import json
import platform
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from devices.cores import usable_cores

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
TITLE = "# Benchmarks\n\nWritten by the scripts in `benchmarks/`, never by hand. Ratios within one run count; absolute times drift with the machine.\n"


def machine() -> str:
    """Processor, cores, memory and versions in one line."""
    import torch

    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        match = re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text())
        name = match.group(1).strip() if match else name
    capability = torch.backends.cpu.get_cpu_capability()
    memory, total, used = psutil.virtual_memory().total / 1024**3, psutil.cpu_count() or 1, usable_cores()
    cores = f"{total} cores" if used == total else f"{used} of {total} cores"
    return f"{name}, {cores} ({capability}), {memory:.0f} GiB, torch {torch.__version__}, Python {platform.python_version()}"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def write_section(name: str, heading: str, body: str, data: Any, page: Path = PAGE) -> None:
    """Replace (or append) one section of the page, and put the raw figures beside it as JSON.

    Args:
        name: marks the section. heading: its title. body: Markdown. data: raw figures.
    """
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    stamp = f"{time.strftime('%Y-%m-%d')}, {machine()}"
    section = f"{begin}\n## {heading}\n\n{stamp}\n\n{body}\n{end}\n"
    text = page.read_text(encoding="utf8") if page.exists() else TITLE
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end) + "\n", re.DOTALL)
    text = pattern.sub(lambda _: section, text) if pattern.search(text) else f"{text}\n{section}"
    page.parent.mkdir(exist_ok=True)
    page.write_text(text, encoding="utf8")
    raw = page.parent / "benchmarks" / f"{name}.json"
    raw.parent.mkdir(exist_ok=True)
    raw.write_text(json.dumps({"when": stamp, "figures": data}, indent=1) + "\n", encoding="utf8")
