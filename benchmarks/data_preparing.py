"""Speed of preparing data beside the tokenizers library alone: `python -m benchmarks.data_preparing [MEGABYTES]`.

The same text, the same tokenizer, the same cores: once `encode_batch` of the library over batches of 1000 texts in
memory, once `prepare` from the JSONL file to finished shards. Each runs in a process of its own, in turn.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.data_scale import long_texts, prose
from benchmarks.parts import children
from benchmarks.parts.results import markdown, write_section
from data.prepare.data_tokenizer import train_data_tokenizer
from data.prepare.training_data import find_training_data
from data.tokenizers.sample import LARGE
from devices.cores import usable_cores
from settings.fields import counted
from settings.loading import load
from units import format_size

REPEATS = 3


def library(path: str, tokenizer_dir: str) -> float:
    """Seconds that the library takes to encode all texts of a file, reading not counted."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(f"{tokenizer_dir}/tokenizer.json")
    seconds = 0.0
    batch: list[str] = []
    with open(path, encoding="utf8") as file:
        for line in [*file, ""]:
            if line:
                batch.append(json.loads(line)["text"])
            if len(batch) == 1000 or not line:
                began = time.perf_counter()
                backend.encode_batch(batch, add_special_tokens=False)
                seconds += time.perf_counter() - began
                batch = []
    return seconds


def ours(path: str, tokenizer_dir: str, folder: str) -> float:
    """Seconds that `prepare` takes, from the file to the shards."""
    from data.prepare.preparing import prepare

    flags = {"train_file": path, "tokenizer_dir": tokenizer_dir, "cache_dir": folder, "shards_dir": f"{folder}/shards"}
    began = time.perf_counter()
    prepare(load("prepare", flags))
    return time.perf_counter() - began


def measure(name: str, *arguments: str) -> dict[str, Any]:
    """Run one of the two in a child process; its seconds and the peak of anonymous memory of its tree."""
    code = f"from benchmarks.data_preparing import {name}; print({name}(*{arguments!r}))"
    child = children.must_run(["-c", code])
    return {"name": name, "seconds": float(child.output.strip().splitlines()[-1]), "peak_bytes": child.peak_bytes}


def main(megabytes: int) -> None:
    """Measure in turn and write the table."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        path = long_texts(folder / "text.jsonl", prose(folder), megabytes * 10**6)
        size = path.stat().st_size
        config = load("tokenizer", {"train_file": str(path), "cache_dir": place, "vocab_size": "16384"})
        data = find_training_data(config.data, False)
        train_data_tokenizer(config.data, "bpe", config.model.vocab_size, data, LARGE).save(folder / "tokenizer")
        runs = []
        for turn in range(REPEATS):
            runs.append(measure("library", str(path), str(folder / "tokenizer")))
            runs.append(measure("ours", str(path), str(folder / "tokenizer"), f"{place}/{turn}"))
            print(runs[-2:], flush=True)
    rows = []
    for name, what in (
        ("library", "`encode_batch` of tokenizers, text in memory"),
        ("ours", "`prepare`, file to shards"),
    ):
        own = [run for run in runs if run["name"] == name]
        best, peak = min(run["seconds"] for run in own), max(run["peak_bytes"] for run in own)
        rows.append([what, f"{best:.1f}", f"{size / best / 1e6:.2f}", format_size(peak)])
    pairs = zip(runs[::2], runs[1::2], strict=True)
    ratios = sorted(theirs["seconds"] / mine["seconds"] for theirs, mine in pairs)
    cores = usable_cores()
    body = markdown(["what", "seconds", "MB/s", "peak (anonymous, whole tree)"], rows)
    body += f"\n\n`prepare` runs at {ratios[0]:.2f}-{ratios[-1]:.2f} of the library's own speed, on {counted(cores, 'core')}."
    print(body)
    write_section("data-preparing", f"Preparing {size / 1e6:.0f} MB of JSONL", body, runs)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 64)
