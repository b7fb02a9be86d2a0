"""Sections of docs/benchmarks.md, one for each benchmark and class of processor.

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
Run = dict[str, Any]  # one system in one turn
TITLE = "# Benchmarks\n\nWritten by the scripts in `benchmarks/`, never by hand. Compare ratios within one run: absolute times vary with the load of the machine. Each class of processor (as named by `doctor`) has its own tables: *fp32 products* has no bf16 units, *avx512_bf16* has them. A step is compared with Hugging Face's T5 as it comes (*shipped*) and in bf16 with fused AdamW and torch.compile (*tuned*); finetuning with a plain PyTorch loop over transformers and PEFT; recipes with Seq2SeqTrainer.\n"


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


def ratio(mine: list[Run], peers: list[Run]) -> str:
    """Speed and peak over the peer's, turn by turn."""
    pairs = pairs_of(mine, peers)
    if not pairs:
        return "-"
    speeds = speeds_of(pairs)
    sizes = [run["peak_bytes"] / base["peak_bytes"] for run, base in pairs]
    return f"{speeds[0]:.2f}-{speeds[-1]:.2f}x at {max(sizes):.2f} of its peak"


def pairs_of(mine: list[Run], others: list[Run]) -> list[tuple[Run, Run]]:
    """The runs of two systems that stood beside each other in one turn."""
    return [(run, base) for run in mine for base in others if base["turn"] == run["turn"] and "failed" not in base]


def speeds_of(pairs: list[tuple[Run, Run]]) -> list[float]:
    """Speed of the first over the second's, turn by turn, the least first."""
    return sorted(run["tokens_per_second"] / base["tokens_per_second"] for run, base in pairs)


def class_of(card: str = "") -> str:
    """The class of what computed: this processor's, or a GPU by its kind and name."""
    return card or processor.here().name


def class_folder(card: str = "") -> str:
    """That class, as it names folders of figures and marks of sections."""
    return re.sub(r"[^\w.]+", "-", class_of(card)).strip("-")


def picture_place(name: str) -> tuple[Path, str]:
    """Where a picture goes, and how the page links to it: a class of processor has its own."""
    link = f"images/{class_folder()}/{name}.png"
    return PAGE.parent / link, link


def pyplot() -> Any:
    """matplotlib.pyplot, which draws into files alone."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def write_section(name: str, heading: str, body: str, data: Any, page: Path = PAGE, card: str = "") -> None:
    """Replace (or append) the section of one benchmark on this class of processor, and put the raw figures beside it as JSON.

    The sections of other classes stay; on the page of benchmarks `page_order` says where each of them stands.

    Args:
        name: marks the section. heading: its title. body: Markdown. data: raw figures.
        card: "cuda NVIDIA H200" where a GPU computed.
    """
    begin, end = (f"<!-- {slash}{name} on {class_folder(card)} -->" for slash in ("", "/"))
    section = f"{begin}\n## {heading} ({class_of(card)})\n\n{_stamp(card)}\n\n{body}\n{end}\n"
    text = page.read_text(encoding="utf8") if page.exists() else TITLE
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end) + "\n", re.DOTALL)
    text = pattern.sub(lambda _: section, text) if pattern.search(text) else f"{text}\n{section}"
    page.parent.mkdir(exist_ok=True)
    write_figures(name, data, page, card)
    if text.startswith(TITLE.splitlines()[0]):  # another page has words of its own, in an order of its own
        text = arranged(text, TITLE, page.parent / "benchmarks")
    page.write_text(text, encoding="utf8")


def show_section(name: str, heading: str, body: str, data: Any, is_written: bool, card: str = "") -> None:
    """Print a section of docs/benchmarks.md, and write it if that is wanted."""
    print(f"\n{heading}\n{body}", flush=True)
    if is_written:
        write_section(name, heading, body, data, card=card)


def write_figures(name: str, data: Any, page: Path = PAGE, card: str = "") -> None:
    """Put raw figures beside a page as JSON, with date and machine."""
    raw = page.parent / "benchmarks" / class_folder(card) / f"{name}.json"
    raw.parent.mkdir(parents=True, exist_ok=True)
    raw.write_text(json.dumps({"when": _stamp(card), "figures": data}, indent=1) + "\n", encoding="utf8")


def _stamp(card: str) -> str:
    return f"{time.strftime('%Y-%m-%d')}, {f'{card}, beside it ' if card else ''}{machine()}"
