"""A model's card tells of the best evaluation, also where the log that told of it is lost."""

from __future__ import annotations

import json
from pathlib import Path

from training.report.card import card

BEST = {"step": 8, "loss": 5.7406, "perplexity": 311.2627, "rows": 12, "tokens": 90}


def test_the_scores_are_in_the_card_of_a_run_that_goes_on_without_its_log(tmp_path: Path) -> None:
    run, log = tmp_path / "runs" / "r", tmp_path / "logs" / "r"
    run.mkdir(parents=True), log.mkdir(parents=True)
    (run / "settings.json").write_text(json.dumps({"log_dir": str(tmp_path / "logs")}))
    end = {
        "event": "end", "step": 8, "seconds": 1.0, "tokens_per_second": 10.0, "measured_peak_bytes": 2**20,
        "first_eval_loss": 7.25, "best_evaluation": BEST,
    }  # fmt: skip
    worse = {"event": "eval", **BEST, "step": 4, "loss": 6.5}
    told = {}
    for name, events in {"whole": [worse, {"event": "eval", **BEST}, end], "torn": [worse, end], "lost": [end]}.items():
        (log / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
        told[name] = card(run)
    assert "On 12 held-out rows, at step 8; loss before training 7.2500." in told["whole"]
    assert "| loss | 5.7406 |\n| perplexity | 311.2627 |" in told["whole"]
    assert told["lost"] == told["torn"] == told["whole"]


def test_the_scores_are_those_of_what_is_published(tmp_path: Path) -> None:
    """By the score that chooses it, and never of the untrained model; also where a run has no end yet."""
    run, log = tmp_path / "runs" / "r", tmp_path / "logs" / "r"
    run.mkdir(parents=True), log.mkdir(parents=True)
    settings = {"log_dir": str(tmp_path / "logs"), "metric_for_best": "bleu"}
    (run / "settings.json").write_text(json.dumps(settings))
    found = [{"event": "eval", "step": step, "loss": loss, "bleu": bleu, "rows": 12} for step, loss, bleu in ((0, 3.0, 5.0), (2, 1.0, 4.0), (4, 2.0, 3.0))]  # fmt: skip
    told = []
    for more in ([], [{**found[0], "step": 6, "loss": 2.5, "bleu": 9.0}], [{**found[0], "step": 8, "bleu": 7.0}]):
        found += more
        (log / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in found))
        told.append(card(run).partition("held-out rows, ")[2].partition(".")[0])
    assert told == ["at step 4", "at step 6", "at step 6"]


def test_what_a_model_is(tmp_path: Path) -> None:
    def about(**settings: object) -> str:
        (tmp_path / "settings.json").write_text(json.dumps({"log_dir": "", **settings}))
        return card(tmp_path).partition("A T5 of ")[2].partition(", made")[0]

    small = {
        "d_model": 8,
        "d_ff": 16,
        "d_kv": 4,
        "num_heads": 2,
        "num_layers": 1,
        "num_decoder_layers": 1,
        "vocab_size": 64,
    }
    weights = about(**small).partition(" weights")[0]
    assert weights == "1,976", "an adapter's folder has no config.json"
    told = [about(**small, **more) for more in ({}, {"finetune_from": "a/base"}, {"finetune_from": "a/base", "objective": "preferences"}, {"finetune_from": "a/base", "is_finetune": True})]  # fmt: skip
    kinds = [
        "pretrained from scratch",
        "trained further from base",
        "trained with preferences from base",
        "finetuned from base",
    ]
    assert told == [f"{weights} weights, {kind}" for kind in kinds]


def test_the_time_of_a_run_that_was_continued_is_that_of_all_its_steps(tmp_path: Path) -> None:
    run, log = tmp_path / "runs" / "r", tmp_path / "logs" / "r"
    run.mkdir(parents=True), log.mkdir(parents=True)
    (run / "settings.json").write_text(json.dumps({"log_dir": str(tmp_path / "logs")}))
    steps = [{"event": "step", "step": step, "seconds": 30.0, "tokens": 600} for step in range(1, 5)]
    end = {"event": "end", "step": 4, "seconds": 30.0, "tokens_per_second": 20.0, "measured_peak_bytes": 2**20}
    nothing_done = {**end, "seconds": 0.0, "tokens_per_second": 0.0}
    told = {}
    for name, events in {
        "whole": [*steps, end], "again": [*steps, end, nothing_done], "late": [*steps[2:], end], "lost": [end],
        "nothing": [nothing_done],
    }.items():  # fmt: skip
        (log / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
        told[name] = card(run)
    assert "| time | 2:00 min, 20 tokens/s |" in told["whole"] and told["again"] == told["whole"]
    assert "| time, from step 3 on | 1:00 min, 20 tokens/s |" in told["late"]
    assert "| time | 30s, 20 tokens/s |" in told["lost"] and "| time" not in told["nothing"]
