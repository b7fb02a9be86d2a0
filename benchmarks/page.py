"""docs/benchmarks.md, made of JSON: `python -m benchmarks.page`.

Each benchmark leaves a file `docs/benchmarks/CLASS/NAME.json` for its class of processor: when and on what it was
measured, the heading and text of its section, rows for the table on top, and the raw figures. The page is made of these
files alone, so a run on one class of processor leaves the sections of the others as they are.
"""

from __future__ import annotations

import json
import platform
import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import psutil

from devices import processor
from devices.cores import usable_cores

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
FIGURES = ROOT / "docs" / "benchmarks"
SummaryRow = tuple[str, str, str, str]  # question, work, this project's figure, that of Hugging Face
INTRODUCTION = """# Benchmarks

Written by `python -m benchmarks.page` from the figures of the scripts in `benchmarks/`, never by hand. Compare ratios within one run:
absolute times vary with the load of the machine. Each class of processor (as named by `doctor`) has its own tables: *fp32 products*
has no bf16 units, *avx512_bf16* has them. A step is compared with Hugging Face's T5 as it comes (*shipped*) and in bf16 with fused
AdamW and torch.compile (*tuned*); finetuning with a plain PyTorch loop over transformers and PEFT; recipes with Seq2SeqTrainer.
"""
# Chapter -> the beginnings of its sections' names, in order.
CHAPTERS = {
    "Memory": ("contract-keeping", "contract-answers", "contract-budgets", "finetuning-"),
    "Speed": (
        "gpus",
        "throughput-t5-small",
        "throughput-",
        "processes",
        "launches",
        "exports",
        "embeddings",
    ),
    "Quality": ("recipe-", "tokenizer-ids"),
    "Plan": ("contract-accuracy",),
    "Data": ("data-path",),
    # Their scripts are in the history of the repository.
    "Earlier studies": (
        "encoders-",
        "plan-encoders",
        "time-",
        "larger-models",
        "busy",
        "generation-",
        "serving-",
        "rates-",
        "quality-",
        "fp16",
        "data-",
    ),
}
MOST_OPEN_ROWS = 16  # A longer table is folded.
TABLE = re.compile(r"(?:^\|.*\n?)+", re.MULTILINE)


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def machine() -> str:
    """Processor, cores, memory and versions in one line."""
    import torch

    total = psutil.cpu_count() or 1
    used = usable_cores()
    cores = f"{total} cores" if used == total else f"{used} of {total} cores"
    capability = torch.backends.cpu.get_cpu_capability()
    memory = psutil.virtual_memory().total / 1024**3
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    return f"{processor.name_of()}, {cores} ({capability}), {memory:.0f} GiB, {versions}"


def class_folder(card: str = "") -> str:
    """The folder of figures of a class: this processor's, or a GPU by its kind and name."""
    return re.sub(r"[^\w.]+", "-", card or processor.here().name).strip("-")


def show_section(
    name: str,
    heading: str,
    text: str,
    figures: Any,
    summary: Iterable[SummaryRow] = (),
    card: str = "",
    is_written: bool = True,
) -> None:
    """Print a section, and write it to the page.

    Args:
        name: of its file. text: Markdown below the heading. figures: raw figures, as JSON holds them.
        summary: its rows in the table on top.
        card: such as "cuda NVIDIA H200", where a GPU computed.
        is_written: whether more than printing is wanted.
    """
    print(f"\n{heading}\n{text}", flush=True)
    if is_written:
        words = {"heading": f"{heading} ({card or processor.here().name})", "text": text, "summary": list(summary)}
        write_figures(name, figures, card, words)
        write_page()


def write_figures(name: str, figures: Any, card: str = "", words: dict[str, Any] | None = None) -> None:
    """Write the figures of one benchmark with date and machine.

    Args:
        words: what the page says of them; None: another page does.
    """
    path = FIGURES / class_folder(card) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    when = f"{time.strftime('%Y-%m-%d')}, {f'{card}, beside it ' if card else ''}{machine()}"
    content = {"when": when, **(words or {}), "figures": figures}
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf8")


def write_part(page: Path, name: str, heading: str, text: str, figures: Any) -> None:
    """Replace, or append, the part of another page that this benchmark keeps on this class of processor."""
    write_figures(name, figures)
    when = json.loads((FIGURES / class_folder() / f"{name}.json").read_text(encoding="utf8"))["when"]
    begin, end = (f"<!-- {slash}{name} on {class_folder()} -->" for slash in ("", "/"))
    part = f"{begin}\n## {heading} ({processor.here().name})\n\n{when}\n\n{text}\n{end}\n"
    content = page.read_text(encoding="utf8")
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end) + "\n", re.DOTALL)
    if pattern.search(content):
        content = pattern.sub(lambda _: part, content)
    else:
        content += f"\n{part}"
    page.write_text(content, encoding="utf8")


def write_page() -> None:
    """Write docs/benchmarks.md anew from all figures."""
    PAGE.write_text(page_of(FIGURES), encoding="utf8")


def page_of(folder: Path) -> str:
    """The page: introduction, a table over all benchmarks, chapters.

    Args:
        folder: of the figures, a folder in it for each class.
    """
    summary = list[tuple[int, str, str, Sequence[str]]]()
    sections = {chapter: list[tuple[int, str, str, str]]() for chapter in CHAPTERS}
    questions = [chapter.lower() for chapter in CHAPTERS]
    for path in sorted(folder.glob("*/*.json")):
        content = json.loads(path.read_text(encoding="utf8"))
        if "text" not in content:
            continue
        chapter, number = _chapter(path.stem)
        section = f"## {content['heading']}\n\n{content['when']}\n\n{_folded(content['text'])}\n"
        sections[chapter].append((number, path.stem, path.parent.name, section))
        for row in content["summary"]:
            summary.append((questions.index(row[0]), path.parent.name, row[1], [*row, path.parent.name]))
    head = ["question", "work", "this project", "Hugging Face", "processor"]
    parts = [INTRODUCTION, markdown(head, [row for *_, row in sorted(summary)]) + "\n"]
    for chapter, entries in sections.items():
        if entries:
            parts += [f"# {chapter}\n", *(section for *_, section in sorted(entries))]
    return "\n".join(parts)


def _chapter(name: str) -> tuple[str, int]:
    """The chapter of a section, and its number there."""
    for chapter, beginnings in CHAPTERS.items():
        for number, beginning in enumerate(beginnings):
            if name.startswith(beginning):
                return chapter, number
    raise ValueError(f"{name} has no chapter in benchmarks/page.py")


def _folded(text: str) -> str:
    """Text whose long tables are folded."""

    def fold(table: re.Match[str]) -> str:
        rows = table[0].strip().count("\n") - 1
        if rows <= MOST_OPEN_ROWS:
            return table[0]
        return f"<details><summary>all {rows} rows</summary>\n\n{table[0].strip()}\n\n</details>\n"

    return TABLE.sub(fold, text)


if __name__ == "__main__":
    write_page()
