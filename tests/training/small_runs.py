"""Runs of a few steps in this process: what they are told, and what they have written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from settings.declared import Config
from settings.loading import load

SMALL = {
    "d_model": 32,
    "d_kv": 16,
    "d_ff": 64,
    "num_heads": 2,
    "num_layers": 1,
    "num_decoder_layers": 2,
    "vocab_size": 512,
    "max_seq_len": 64,
    "max_steps": 6,
    "save_steps": 2,
    "eval_steps": 3,
    "effective_batch_size": 8,
    "dropout_rate": 0.1,
    "eval_rows": 8,
    "mixed_precision": "no",
    "sample_rows": 0,
    "num_threads": 1,
}


def configuration(folder: Path, name: str, **flags: object) -> Config:
    """A run over `folder/text.txt`; `flags` replace what stands in `SMALL`."""
    folders = {
        "train_file": folder / "text.txt",
        "output_dir": folder / "runs",
        "log_dir": folder / "logs",
        "cache_dir": folder / "cache",
        "run_name": name,
    }
    return load("train", {key: str(value) for key, value in {**folders, **SMALL, **flags}.items()})


def events(folder: Path, name: str, kind: str) -> list[dict[str, Any]]:
    """What a run has written of one kind."""
    lines = (folder / "logs" / name / "metrics.jsonl").read_text("utf8").splitlines()
    return [event for line in lines if (event := json.loads(line))["event"] == kind]
