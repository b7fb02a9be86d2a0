"""A model's card tells of what is published, also where the log that told of it is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from training.report.card import card

BEST = {"step": 8, "loss": 5.7406, "perplexity": 311.2627, "rows": 12, "tokens": 90}
END = {
    "event": "end",
    "step": 8,
    "seconds": 30.0,
    "tokens_per_second": 20.0,
    "measured_peak_bytes": 2**20,
    "first_eval_loss": 7.25,
    "best_evaluation": BEST,
}
SHAPE = dict.fromkeys(("num_layers", "num_decoder_layers"), 1) | {
    "d_model": 8,
    "d_ff": 16,
    "d_kv": 4,
    "num_heads": 2,
    "vocab_size": 64,
}


class Run:
    """A run's two folders, and its card."""

    def __init__(self, folder: Path) -> None:
        self.run = folder / "runs" / "r"
        self.log = folder / "logs" / "r"
        self.run.mkdir(parents=True)
        self.log.mkdir(parents=True)

    def card(self, *events: dict[str, Any], **settings: object) -> str:
        (self.run / "settings.json").write_text(json.dumps({"log_dir": str(self.log.parent), **settings}))
        (self.log / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
        return card(self.run)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_the_time_of_a_run_that_was_continued_is_that_of_all_its_steps(run: Run) -> None:
    steps = [{"event": "step", "step": step, "seconds": 30.0, "tokens": 600} for step in range(1, 5)]
    nothing_done = {**END, "seconds": 0.0, "tokens_per_second": 0.0}
    whole = run.card(*steps, END)
    assert "| time | 2:00 min, 20 tokens/s |" in whole and run.card(*steps, END, nothing_done) == whole
    assert "| time, from step 3 on | 1:00 min, 20 tokens/s |" in run.card(*steps[2:], END)
    assert "| time" not in run.card(END), "the log that knew is lost"


def test_what_was_measured_stands_beside_the_first_plan_of_the_start(run: Run) -> None:
    plans = [{"event": "plan", "peak_bytes": size << 20, "budget_bytes": 64 << 20} for size in (40, 50, 30)]
    starts = [{"event": "start"}, plans[0], {"event": "start"}, *plans[1:]]
    assert "| planned peak | 50.0 MiB of 64.0 MiB |" in run.card(*starts, END)


def test_embeddings_are_used_by_sentence_transformers(run: Run) -> None:
    text = run.card(END, head="embedding", num_decoder_layers=0)
    assert "library_name: sentence-transformers\npipeline_tag: sentence-similarity\n" in text
    assert 'SentenceTransformer(".")' in text and "AutoTokenizer" not in text
