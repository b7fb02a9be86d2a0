"""Memory of the data path on large data: `python -m benchmarks.data_scale [TOKENIZER_GB] [PREPARE_GB] [ROWS]`.

Memory only, of whole process trees: preparing and tokenizer training on many gigabytes of text, removal of duplicates
among millions of rows. The rows are made of the built-in prose, cut and numbered so that no two are alike, and one in ten
of the short ones repeats an earlier one.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.parts import children
from benchmarks.parts.results import markdown, write_section
from benchmarks.parts.rows import read_rows
from data.sources.corpus import build_sample_corpus
from units import GIB, MIB, format_size

ROW_LETTERS = 100
SHARE_REPEATED = 0.1


def prose(folder: Path) -> list[str]:
    """The built-in texts."""
    return [row["text"] for row in read_rows(build_sample_corpus(folder).text)]


def long_texts(path: Path, texts: list[str], size_bytes: int) -> Path:
    """Write the texts over and over, each time with another number, until the file has this size."""
    size = turn = 0
    with path.open("w", encoding="utf8") as file:
        while size < size_bytes:
            for text in texts:
                size += file.write(json.dumps({"text": f"{turn} {text}"}, ensure_ascii=False) + "\n")
            turn += 1
    return path


def short_rows(path: Path, texts: list[str], count: int) -> Path:
    """Write rows of about 100 letters, words drawn from the prose; some repeat an earlier one."""
    draw, words = random.Random(1), sorted({word for text in texts for word in text.split()})
    recent: list[list[str]] = []
    with path.open("w", encoding="utf8") as file:
        for _ in range(count):
            if recent and draw.random() < SHARE_REPEATED:
                row = draw.choice(recent)
            else:
                row = draw.choices(words, k=ROW_LETTERS // 7)
                recent = [*recent[-99:], row]
            file.write(json.dumps({"text": " ".join(row)}, ensure_ascii=False) + "\n")
    return path


def command(folder: Path, name: str, *flags: str) -> list[str]:
    """One command of the program."""
    return ["train_low_mem.py", name, f"--cache_dir={folder / 'cache'}", *flags]


def measure(what: str, arguments: list[str]) -> dict[str, Any]:
    """Run Python with these arguments."""
    child = children.must_run(arguments)
    print(child.output + child.messages, flush=True)
    return {"what": what, "command": " ".join(arguments), "seconds": child.seconds, "peak_bytes": child.peak_bytes}


def main(gigabytes: float, prepared_gigabytes: float, rows: int) -> None:
    """Measure in turn and write the table."""
    runs = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        texts = prose(folder)
        text = long_texts(folder / "long.jsonl", texts, int(gigabytes * 10**9))
        for kind in ("bpe", "unigram"):
            flags = (f"--train_file={text}", f"--tokenizer_dir={folder / kind}", f"--tokenizer_type={kind}")
            what = f"`tokenizer --tokenizer_type={kind}` on {gigabytes:g} GB"
            runs.append(measure(what, command(folder, "tokenizer", "--vocab_size=32000", *flags)))
        text.unlink()
        works: tuple[tuple[str, Callable[[Path, list[str], int], Path], int, tuple[str, ...]], ...] = (
            (f"`prepare` on {prepared_gigabytes:g} GB", long_texts, int(prepared_gigabytes * 10**9), ()),
            (f"`prepare --dedup=exact` on {rows:,} rows", short_rows, rows, ("--dedup=exact", "--clean=True")),
        )
        for what, write, size, extra in works:
            path = write(folder / "rows.jsonl", texts, size)
            shards = folder / f"shards_{len(runs)}"
            own = (f"--train_file={path}", f"--tokenizer_dir={folder / 'bpe'}", f"--shards_dir={shards}")
            runs.append(measure(what, command(folder, "prepare", *own, *extra)))
    table = [[run["what"], format_size(run["peak_bytes"]), f"{run['seconds']:,.0f}"] for run in runs]
    body = markdown(["work", "peak (anonymous, whole tree)", "seconds"], table)
    body += f"\n\nLimits: tokenizer and duplicates {format_size(GIB)}, preparing {format_size(400 * MIB)}."
    print(body)
    write_section("data-scale", "Data larger than memory", body, runs)


if __name__ == "__main__":
    given = sys.argv[1:]
    sizes = [*given, *("10", "10", "10000000")[len(given) :]]
    main(float(sizes[0]), float(sizes[1]), int(sizes[2]))
