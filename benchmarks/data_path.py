"""Memory and speed of the data path: `python -m benchmarks.data_path [--megabytes=64] [--rows=400000] [--write=True]`.

1. `prepare`, from a JSONL file to finished shards, beside `encode_batch` of the tokenizers library over the same texts
in memory. 2. Shuffled reads of one Arrow file, by `LowMemDataset` in each of its modes, and by Hugging Face datasets,
map-style.

Each system runs in a child process of its own, in turn. Files go to the system's folder for temporary files.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.page import markdown, show_section
from benchmarks.parts import children
from benchmarks.parts.rows import read_rows
from data.batches.order import Order
from data.dataset import MODES, LowMemDataset
from data.sources.corpus import build_sample_corpus
from support.units import format_size

OPTIONS = {"megabytes": "64", "rows": "400000", "repeats": "3", "write": "True"}
READS = 40_000
ENCODED_TOGETHER = 1000
PREPARERS = {"library": "`encode_batch` of tokenizers, text in memory", "ours": "`prepare`, file to shards"}
READERS = {**{mode: f"LowMemDataset, mode {mode}" for mode in MODES}, "datasets": "datasets, map-style, `shuffle`"}


def batches_of(path: str) -> Iterator[list[str]]:
    """The texts of a file."""
    batch = list[str]()
    with open(path, encoding="utf8") as file:
        for line in file:
            batch.append(json.loads(line)["text"])
            if len(batch) == ENCODED_TOGETHER:
                yield batch
                batch = []
    yield batch


def encode(system: str, path: str, tokenizer_dir: str, folder: str) -> None:
    """Print the seconds that a system takes to encode a file; the library's without reading it."""
    if system == "library":
        os.environ["TOKENIZERS_PARALLELISM"] = "true"
        from tokenizers import Tokenizer

        backend = Tokenizer.from_file(f"{tokenizer_dir}/tokenizer.json")
        seconds = 0.0
        for batch in batches_of(path):
            began = time.perf_counter()
            backend.encode_batch(batch, add_special_tokens=False)
            seconds += time.perf_counter() - began
    else:
        words = [f"--train_file={path}", f"--tokenizer_dir={tokenizer_dir}", f"--cache_dir={folder}"]
        seconds = children.must_run(["train_low_mem.py", "prepare", *words, f"--shards_dir={folder}/shards"]).seconds
    print(json.dumps({"seconds": seconds}))


def read(system: str, path: str) -> None:
    """Print the rows a second of shuffled reads, and how much anonymous memory they took."""
    if system == "datasets":
        import datasets  # type: ignore[import-untyped]

        dataset = datasets.Dataset.from_file(path).shuffle(seed=1)
        numbers = range(READS)
    else:
        dataset = LowMemDataset(path, ["number", "text"], mode=system)
        numbers = Order(len(dataset), 1).rows(np.arange(READS)).tolist()
    before = children.status_bytes()["RssAnon"]
    began = time.perf_counter()
    for number in numbers:
        dataset[number]
    seconds = time.perf_counter() - began
    grown = children.status_bytes()["RssAnon"] - before
    print(json.dumps({"rows_per_second": READS / seconds, "grown_bytes": grown}))


def write_texts(path: Path, megabytes: int) -> None:
    """Write the built-in prose over and over, each time with another number, until the file has its size."""
    texts = [row["text"] for row in read_rows(build_sample_corpus(path.parent).text)]
    size = number = 0
    with path.open("w", encoding="utf8") as file:
        while size < megabytes * 10**6:
            size += file.write(json.dumps({"text": f"{number} {texts[number % len(texts)]}"}) + "\n")
            number += 1


def write_rows(path: Path, rows: int) -> None:
    """Write rows of 640 letters as an Arrow stream."""
    text = "all work and no play makes a dull row " * 16
    schema = pa.schema({"number": pa.int64(), "text": pa.string()})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        for first in range(0, rows, ENCODED_TOGETHER):
            numbers = range(first, min(first + ENCODED_TOGETHER, rows))
            writer.write_batch(pa.record_batch([list(numbers), [f"{n} {text}" for n in numbers]], schema=schema))


def measure(function: str, system: str, *arguments: str) -> dict[str, Any]:
    """Run a function of this file in a child process."""
    child = children.must_run(["-m", "benchmarks.data_path", function, system, *arguments])
    run = {"system": system, "peak_bytes": child.peak_bytes, **child.figures}
    print(json.dumps(run), flush=True)
    return run


def table(encoded: list[dict[str, Any]], reads: list[dict[str, Any]], size: int) -> str:
    """Both comparisons."""
    rows = []
    for system, title in PREPARERS.items():
        runs = [run for run in encoded if run["system"] == system]
        seconds = min(run["seconds"] for run in runs)
        peak = format_size(max(run["peak_bytes"] for run in runs))
        rows.append([title, f"{seconds:.1f}", f"{size / seconds / 1e6:.2f}", peak])
    preparing = markdown(["what", "seconds", "MB/s", "peak (anonymous, whole tree)"], rows)
    rows = [
        [READERS[run["system"]], f"{run['rows_per_second']:,.0f}", format_size(run["grown_bytes"])] for run in reads
    ]
    return f"{preparing}\n\n{markdown(['shuffled reads', 'rows/s', 'growth of anonymous memory'], rows)}"


def main(arguments: list[str]) -> None:
    """Measure in turn; all flags are --name=value."""
    _, options = children.options_of(arguments, OPTIONS, str(__doc__))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = folder / "text.jsonl"
        write_texts(texts, int(options["megabytes"]))
        tokenizer = folder / "tokenizer"
        flags = [f"--train_file={texts}", f"--tokenizer_dir={tokenizer}", f"--cache_dir={folder}/cache"]
        children.must_run(["train_low_mem.py", "tokenizer", *flags, "--vocab_size=16384"])
        encoded = []
        for turn in range(int(options["repeats"])):
            for system in PREPARERS:
                encoded.append(measure("encode", system, str(texts), str(tokenizer), f"{folder}/{turn}"))
        rows = folder / "rows.arrow"
        write_rows(rows, int(options["rows"]))
        reads = [measure("read", system, str(rows)) for system in READERS]
        size = texts.stat().st_size
    heading = f"Preparing {size / 1e6:.0f} MB of JSONL, and reading {READS:,} of {int(options['rows']):,} rows"
    figures = {"encoded": encoded, "reads": reads}
    is_written = options["write"] == "True"
    show_section("data-path", heading, table(encoded, reads, size), figures, is_written=is_written)


if __name__ == "__main__":
    if sys.argv[1:2] == ["encode"]:
        encode(*sys.argv[2:])
    elif sys.argv[1:2] == ["read"]:
        read(*sys.argv[2:])
    else:
        main(sys.argv[1:])
