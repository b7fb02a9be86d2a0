"""A run whose answers come from a list: its evaluations, its folder, and where it goes on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.training.small_runs import configuration, events
from trainer_low_mem import LowMemTrainer

pytestmark = pytest.mark.usefixtures("one_thread")
NAMES = ("red", "blue", "green")


def test_answers_may_be_named_themselves(tmp_path: Path) -> None:
    rows = tmp_path / "pairs.jsonl"
    rows.write_text("".join(json.dumps({"prompt": "x", "response": name}) + "\n" for name in NAMES))
    flags = {
        "train_file": rows,
        "validation_file": rows,
        "is_finetune": True,
        "finetune_from": "none",
        "max_seq_len": 16,
        "answers": "blue, red",
        "eval_generate_rows": 3,
        "max_steps": 1,
        "sample_rows": 3,
        "metrics": "identical",
        "tokenizer_type": "byte",
    }
    LowMemTrainer(configuration(tmp_path, "named", **flags)).train()
    assert {event["answer"] for event in events(tmp_path, "named", "sample")} <= {"blue", "red"}
    assert (tmp_path / "runs" / "named" / "answers.txt").read_text() == "blue\nred\n"


def test_a_run_is_evaluated_by_ranked_answers_and_leaves_their_list(tmp_path: Path) -> None:
    rows = tmp_path / "pairs.jsonl"
    listed = tmp_path / "colors.csv"
    rows.write_text("".join(json.dumps({"prompt": "x", "response": name}) + "\n" for name in NAMES))
    listed.write_text("id,response\n" + "".join(f"1,{name}\n" for name in NAMES))
    flags = {
        "train_file": rows,
        "validation_file": rows,
        "is_finetune": True,
        "finetune_from": "none",
        "max_seq_len": 16,
        "answers": listed,
        "num_beams": 3,
        "num_answers": 3,
        "eval_generate_rows": 3,
        "max_steps": 2,
        "sample_rows": 1,
        "metrics": "recall@2,ndcg@3,mrr",
        "metric_for_best": "ndcg@3",
        "tokenizer_type": "byte",
    }
    LowMemTrainer(configuration(tmp_path, "ranked", **flags)).train()
    evaluations = events(tmp_path, "ranked", "eval")
    for event in evaluations:  # each answer is right for one of the rows: all ranks are there, whatever the model
        assert event["recall@2"] == pytest.approx(200 / 3) and event["mrr"] == pytest.approx(1100 / 18)
        assert event["ndcg@3"] == pytest.approx(100 * (1 + 1 / np.log2(3) + 1 / 2) / 3)
    assert {event["answer"] for event in events(tmp_path, "ranked", "sample")} <= set(NAMES)
    run = tmp_path / "runs" / "ranked"
    for folder in (run, run / "checkpoints" / "step_00000002"):
        assert (folder / "answers.txt").read_text() == "red\nblue\ngreen\n"
        assert "answers.txt" in json.loads((folder / "checksums.json").read_text())["files"]
    listed.unlink()  # a run that goes on has its own, as its checkpoints have
    (run / "answers.txt").unlink()
    more = {"max_steps": 3, "is_keep_training": True, "answers": listed}
    LowMemTrainer(configuration(tmp_path, "ranked", **{**flags, **more})).train()
    assert len(events(tmp_path, "ranked", "eval")) == len(evaluations) + 1
