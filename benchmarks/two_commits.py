"""Peak memory and speed of another commit and of this tree, in turns: `python -m benchmarks.two_commits
--commit=b3a3f91b`.

The commit is unpacked beside, and the same command lines run with the same interpreter, first there, then here,
`--times` over. Shown are medians, and this tree over the commit: peaks of the process tree as the runs have measured
them, and seconds a step without the first ones.
"""

from __future__ import annotations

import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.page import ROOT, markdown, show_section
from benchmarks.parts.children import options_of

OPTIONS = {"commit": "b3a3f91b", "times": "3", "cases": "all", "write": "False"}
LEFT_OUT = 3  # Steps with which libraries are loaded.
SECONDS = 900
SMALL = "--max_seq_len=128 --effective_batch_size=16 --max_steps=20"
CASES = {
    "tiny, text": "train --train_file={text} --max_seq_len=128 --effective_batch_size=32 --max_steps=60",
    "t5-small, text": f"train --train_file={{text}} --model_preset=t5-small --memory_budget=2G {SMALL}",
    "t5-small, ultra": f"train --train_file={{text}} --model_preset=t5-small --memory_mode=ultra --memory_budget=800M {SMALL}",
    "t5-small, pairs": f"train --is_finetune=True --finetune_from=none --train_file={{pairs}} --model_preset=t5-small {SMALL}",
    "t5-small, LoRA over int8": (
        f"train --train_file={{text}} --finetune_from=none --model_preset=t5-small --lora_rank=8 --lora_base=int8 "
        f"{SMALL}"
    ),
    "short rows": (
        "train --is_finetune=True --finetune_from=none --train_file={pairs} --max_seq_len=32 --effective_batch_size=256"
        " --max_steps=60"
    ),
}


def unpack(commit: str, folder: Path) -> Path:
    """The files of a commit of this repository."""
    packed = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def write_data(folder: Path) -> dict[str, Path]:
    """Text and pairs of this repository's own pages."""
    pages = "\n".join(path.read_text("utf8") for path in sorted((ROOT / "docs").glob("*.md")))
    lines = [line for line in pages.splitlines() if len(line.split()) > 5]
    (folder / "text.txt").write_text(pages, "utf8")
    rows = [{"prompt": line[:60], "response": line[60:160] or line} for line in lines]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf8")
    return {"text": folder / "text.txt", "pairs": folder / "pairs.jsonl"}


def measure(tree: Path, line: str, folder: Path) -> dict[str, float]:
    """Peak bytes and seconds a step of one run."""
    fixed = {
        "output_dir": folder / "runs",
        "log_dir": folder / "logs",
        "cache_dir": folder / "cache",
        "run_name": "one",
        "overwrite": True,
        "sample_rows": 0,
        "eval_rows": 4,
        "seed": 1,
        "log_steps": 1,
        "tokenizer_type": "byte",
    }
    words = [*line.split(), *(f"--{name}={value}" for name, value in fixed.items())]
    subprocess.run(
        [sys.executable, str(tree / "train_low_mem.py"), *words],
        cwd=folder,
        capture_output=True,
        timeout=SECONDS,
        check=True,
        env={**os.environ, "XDG_CACHE_HOME": str(folder / "measured")},
    )
    events = [json.loads(text) for text in (folder / "logs" / "one" / "metrics.jsonl").read_text("utf8").splitlines()]
    seconds = [event["seconds"] for event in events if event["event"] == "step"]
    losses = [event["loss"] for event in events if event["event"] == "step"]
    return {
        "peak": events[-1]["measured_peak_bytes"],
        "seconds": statistics.median(seconds[LEFT_OUT:]),
        "loss": losses[-1],
    }


def compare(commit: str, times: int, cases: list[str]) -> list[dict[str, Any]]:
    """A row for each case: the figures of every run, of the commit and of this tree."""
    rows = []
    with tempfile.TemporaryDirectory() as made:
        there = unpack(commit, Path(made, "there"))
        data = write_data(Path(made))
        for case in cases:
            row: dict[str, Any] = {"case": case, "there": [], "here": []}
            for _ in range(times):
                # In turns, so that what changes on the machine meets both.
                for side, tree in (("there", there), ("here", ROOT)):
                    folder = Path(made, side + "-folder")
                    folder.mkdir(exist_ok=True)
                    row[side].append(measure(tree, CASES[case].format(**data), folder))
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def body(rows: list[dict[str, Any]]) -> str:
    """The table: medians of both sides, and this tree over the commit."""
    cells = []
    for row in rows:
        there, here = (
            {name: statistics.median(run[name] for run in row[side]) for name in ("peak", "seconds", "loss")}
            for side in ("there", "here")
        )
        cells.append(
            [
                row["case"],
                f"{there['peak'] / 2**20:.0f} MiB",
                f"{here['peak'] / 2**20:.0f} MiB",
                f"{here['peak'] / there['peak']:.3f}",
                f"{there['seconds'] / here['seconds']:.3f}",
                f"{abs(here['loss'] / there['loss'] - 1):.1e}",
            ]
        )
    return markdown(["case", "peak there", "peak here", "peak ratio", "speed ratio", "loss differs by"], cells)


def main(words: list[str]) -> None:
    """Measure, and show the section."""
    _, options = options_of(words, OPTIONS, __doc__ or "")
    cases = list(CASES) if options["cases"] == "all" else options["cases"].split(";")
    rows = compare(options["commit"], int(options["times"]), cases)
    title = f"This tree beside {options['commit']}"
    show_section("two-commits", title, body(rows), rows, is_written=options["write"] == "True")


if __name__ == "__main__":
    main(sys.argv[1:])
