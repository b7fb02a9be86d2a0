"""Where do measured figures go? Into docs/benchmarks.md, each benchmark and class of processor in a section of its own.

With date and machine. A run on one class of processor leaves the tables of the others unchanged.
"""

from __future__ import annotations

import json
import platform
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.parts.page_order import arranged
from devices import processor
from devices.cores import usable_cores

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
TITLE = "# Benchmarks\n\nWritten by the scripts in `benchmarks/`, never by hand. Ratios within one run count; absolute times drift with the machine. Each class of processor (as `doctor` names it) has tables of its own.\n"


def machine() -> str:
    """Processor, cores, memory and versions in one line."""
    import torch

    name = processor.name_of()
    capability = torch.backends.cpu.get_cpu_capability()
    memory, total, used = psutil.virtual_memory().total / 1024**3, psutil.cpu_count() or 1, usable_cores()
    cores = f"{total} cores" if used == total else f"{used} of {total} cores"
    return f"{name}, {cores} ({capability}), {memory:.0f} GiB, torch {torch.__version__}, Python {platform.python_version()}"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def class_folder() -> str:
    """The class of this processor, as it names folders of figures and marks of sections."""
    return processor.here().name.replace(" ", "-")


def picture_place(name: str, page: Path = PAGE) -> tuple[Path, str]:
    """Where a picture goes, and how the page links to it: a class of processor has its own."""
    link = f"images/{class_folder()}/{name}.png"
    return page.parent / link, link


def write_section(name: str, heading: str, body: str, data: Any, page: Path = PAGE) -> None:
    """Replace (or append) the section of one benchmark on this class of processor, and put the raw figures beside it as JSON.

    The sections of other classes stay; `page_order` says where each of them stands.

    Args:
        name: marks the section. heading: its title. body: Markdown. data: raw figures.
    """
    begin, end = (f"<!-- {slash}{name} on {class_folder()} -->" for slash in ("", "/"))
    stamp = f"{time.strftime('%Y-%m-%d')}, {machine()}"
    section = f"{begin}\n## {heading} ({processor.here().name})\n\n{stamp}\n\n{body}\n{end}\n"
    text = page.read_text(encoding="utf8") if page.exists() else TITLE
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end) + "\n", re.DOTALL)
    text = pattern.sub(lambda _: section, text) if pattern.search(text) else f"{text}\n{section}"
    page.parent.mkdir(exist_ok=True)
    write_figures(name, data, page)
    page.write_text(arranged(text, TITLE, page.parent / "benchmarks"), encoding="utf8")


def write_figures(name: str, data: Any, page: Path = PAGE) -> None:
    """Put raw figures beside a page as JSON, with date and machine."""
    raw = page.parent / "benchmarks" / class_folder() / f"{name}.json"
    raw.parent.mkdir(parents=True, exist_ok=True)
    stamp = f"{time.strftime('%Y-%m-%d')}, {machine()}"
    raw.write_text(json.dumps({"when": stamp, "figures": data}, indent=1) + "\n", encoding="utf8")
