"""The step of a large batch of pairs: `python -m benchmarks.embeddings [--peer=PYTHON] [--write=True]`.

t5-small's encoder, random weights, --rows (4096) pairs of --tokens (32) each in one step, under --budget (2560M):

    pairs:   the exact contrastive loss of all of them
    labels:  the same texts with a label each, without a loss that compares them
    peer:    sentence-transformers' CachedMultipleNegativesRankingLoss with AdamW, run by --peer, a Python that has it

Peak: the most anonymous memory of the process that trains. Seconds: of a step, without the first.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.page import ROOT, markdown, show_section
from benchmarks.parts import children, watched
from support.units import format_size

OPTIONS = {"rows": "4096", "tokens": "32", "budget": "2560M", "steps": "3", "peer": "", "write": "False"}
PEER = ROOT / "benchmarks" / "parts" / "embedding_peer.py"
WORDS = 40_000
FURTHER_ROWS = 256  # To be held out.


def write_rows(folder: Path, rows: int, tokens: int) -> tuple[Path, Path]:
    """Random texts of more tokens than are read: as pairs, and one by one with a label."""
    draw = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = ["".join(draw.choice(letters, draw.integers(3, 9))) for _ in range(WORDS)]
    pairs = folder / "pairs.jsonl"
    labels = folder / "labels.jsonl"
    with pairs.open("w") as pair_file, labels.open("w") as label_file:
        for _ in range(rows + FURTHER_ROWS):
            texts = [" ".join(words[number] for number in draw.integers(0, WORDS, 2 * tokens)) for _ in range(2)]
            pair_file.write(json.dumps({"anchor": texts[0], "positive": texts[1]}) + "\n")
            for text in texts:
                label_file.write(json.dumps({"text": text, "label": draw.random()}) + "\n")
    return pairs, labels


def ours(file: Path, rows: int, options: dict[str, str], **flags: Any) -> dict[str, Any]:
    """Train some steps on a file."""
    run = watched.train(
        {
            "model_preset": "t5-small",
            "tokenizer_type": "bpe",
            "num_threads": 2,
            "train_file": file,
            "max_seq_len": options["tokens"],
            "effective_batch_size": rows,
            "memory_budget": options["budget"],
            "max_steps": options["steps"],
            "eval_rows": 64,
            "sample_rows": 0,
            "probe": False,
            "log_steps": 1,
            "learning_rate": 1e-4,
            **flags,
        }
    )
    if run.returncode:
        raise RuntimeError(run.messages[-2000:])
    return {
        "seconds": statistics.median(step["seconds"] for step in run.steps[1:]),
        "peak_bytes": run.peak_bytes,
        "planned_bytes": run.plan["peak_bytes"],
    }


def main(arguments: list[str]) -> None:
    """Measure in turn; all flags are --name=value."""
    _, options = children.options_of(arguments, OPTIONS, str(__doc__))
    rows = int(options["rows"])
    figures: dict[str, Any] = {name: options[name] for name in ("rows", "tokens", "budget")}
    with tempfile.TemporaryDirectory() as name:
        pairs, labels = write_rows(Path(name), rows, int(options["tokens"]))
        figures["pairs"] = ours(pairs, rows, options, head="embedding")
        figures["labels"] = ours(labels, 2 * rows, options, head="sequence", labels="regression")
    if options["peer"]:
        child = children.must_run(
            [str(PEER), options["rows"], options["tokens"], options["steps"]], python=options["peer"]
        )
        figures["peer"] = {**child.figures, "peak_bytes": child.peak_bytes}
    show_section("embeddings", heading(figures), table(figures), figures, is_written=options["write"] == "True")


def heading(figures: dict[str, Any]) -> str:
    """The heading of the section."""
    return f"A step of {int(figures['rows']):,} pairs of {figures['tokens']} tokens"


def table(figures: dict[str, Any]) -> str:
    """The figures as a table."""
    names = {
        "pairs": "exact contrastive loss",
        "labels": "a label for each text, no comparison",
        "peer": "sentence-transformers, cached contrastive loss",
    }
    base = figures["labels"]["seconds"]
    rows = []
    for name, title in names.items():
        if name in figures:
            each = figures[name]
            planned = format_size(each["planned_bytes"]) if "planned_bytes" in each else ""
            times = f"{each['seconds'] / base:.2f}"
            rows.append([title, f"{each['seconds']:.1f}", times, format_size(each["peak_bytes"]), planned])
    return markdown(["t5-small's encoder", "s a step", "times the labels", "peak", "planned"], rows)


if __name__ == "__main__":
    main(sys.argv[1:])
