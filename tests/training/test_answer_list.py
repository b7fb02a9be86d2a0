"""A run whose answers come from a list: its evaluations, its folder, and where it goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from commands.convert import convert
from commands.evaluate import evaluate
from commands.generate import generate
from data.text.histories import check_excluding
from data.text.templates import Template
from data.tokenizers.training import train_tokenizer
from model.decoding.generation import generate_best
from settings.errors import UserError
from settings.loading import load
from tests.training.small_runs import configuration, events
from trainer_low_mem import LowMemTrainer
from training.evaluation import answers

pytestmark = pytest.mark.usefixtures("one_thread")
NAMES = ("red", "blue", "green")


def test_a_run_is_evaluated_by_ranked_answers_and_leaves_their_list(tmp_path: Path) -> None:
    rows, listed = tmp_path / "pairs.jsonl", tmp_path / "colors.csv"
    rows.write_text("".join(json.dumps({"prompt": "x", "response": name}) + "\n" for name in NAMES))
    listed.write_text("id,response\n" + "".join(f"1,{name}\n" for name in NAMES))
    flags = {
        "train_file": rows, "validation_file": rows, "is_finetune": True, "finetune_from": "none", "max_seq_len": 16,
        "answers": listed, "num_beams": 3, "num_answers": 3, "eval_generate_rows": 3, "max_steps": 2, "sample_rows": 1,
        "metrics": "recall@2,ndcg@3,mrr", "metric_for_best": "ndcg@3", "tokenizer_type": "byte",
    }  # fmt: skip
    LowMemTrainer(configuration(tmp_path, "ranked", **flags)).train()
    found = events(tmp_path, "ranked", "eval")
    for event in found:  # each answer is right for one of the rows: all ranks are there, whatever the model
        assert event["recall@2"] == pytest.approx(200 / 3) and event["mrr"] == pytest.approx(1100 / 18)
        assert event["ndcg@3"] == pytest.approx(100 * (1 + 1 / np.log2(3) + 1 / 2) / 3)
    assert {event["answer"] for event in events(tmp_path, "ranked", "sample")} <= set(NAMES)
    run = tmp_path / "runs" / "ranked"
    for folder in (run, run / "checkpoints" / "step_00000002"):
        assert (folder / "answers.txt").read_text() == "red\nblue\ngreen\n"
        assert "answers.txt" in json.loads((folder / "checksums.json").read_text())["files"]
    listed.unlink()  # a run that goes on has its own
    more = {"max_steps": 3, "is_keep_training": True, "answers": listed}
    LowMemTrainer(configuration(tmp_path, "ranked", **{**flags, **more})).train()
    assert len(events(tmp_path, "ranked", "eval")) == len(found) + 1
    with pytest.raises(UserError, match="--num_answers"):
        LowMemTrainer(configuration(tmp_path, "other", **{**flags, "answers": rows, "num_beams": 2})).train()


def test_a_model_of_histories_recommends_items_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = {f"item{number}": [number % 3, number] for number in range(9)}
    rows, items = tmp_path / "histories.jsonl", tmp_path / "ids.jsonl"
    histories = [[f"item{(start + at) % 9}" for at in range(4)] for start in range(9)]
    rows.write_text("".join(json.dumps({"items": history}) + "\n" for history in histories))
    items.write_text("".join(json.dumps({"item": item, "codes": code}) + "\n" for item, code in codes.items()))
    flags = {
        "train_file": rows, "item_file": items, "history_items": 2, "num_beams": 9, "num_answers": 9, "max_steps": 1,
        "eval_generate_rows": 4, "metrics": "recall@6", "metric_for_best": "recall@6", "exclude_seen": True,
        "loss_over": "answers", "eval_rows": 9, "history_prompts": 3,
    }  # fmt: skip
    at_once = list[int]()

    def search(decoder: Any, prompts: list[Any], *args: Any) -> Any:
        at_once.append(len(prompts))
        return generate_best(decoder, prompts, *args)

    with monkeypatch.context() as patched:
        patched.setattr(answers, "generate_best", search)
        LowMemTrainer(configuration(tmp_path, "bought", **flags)).train()
    assert max(at_once) == 4, "no more prompts at once than were planned, though each row has several"
    measured = events(tmp_path, "bought", "eval")
    assert {event["recall@6"] for event in measured} == {100.0}, "the three seen ones of nine are left out"
    items.unlink()  # the model has its own
    asked, output = tmp_path / "asked.parquet", tmp_path / "answers.jsonl"
    users = [["item3", "item4", "item5", "item6"], ["item1"], ["item4", "item5", "item6"]]
    pq.write_table(pa.table({"user": [7, 8, 9], "items": users}), asked)
    run = tmp_path / "runs" / "bought"
    flags = {"model": run, "input": asked, "output": output, "num_answers": 9}
    generate(load("generate", {name: str(value) for name, value in flags.items()}))
    found = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["user"] for row in found] == [7, 8, 9]
    for row in found:
        assert sorted([*row["items"], *row["response_items"]]) == [*codes], "none of the history's items, all others"
        assert row["responses"] == [f"<a_{codes[item][0]}> <b_{codes[item][1]}>" for item in row["response_items"]]
    flags |= {"output": tmp_path / "short.jsonl", "history_items": 9, "max_seq_len": 8}  # three items and the end
    generate(load("generate", {name: str(value) for name, value in flags.items()}))
    long, _, short = (json.loads(line)["response_items"] for line in flags["output"].read_text().splitlines())
    assert long == [item for item in short if item not in users[0]], "the oldest items of a long prompt are left out"
    # the mean over prompts that end an item earlier each is that of their answers when each is asked alone
    asked.unlink()
    table = pa.table({"items": [users[0][: 4 - age] for age in range(3)]})
    pq.write_table(table, asked)
    found = []
    for prompts in (1, 3):
        flags |= {"output": tmp_path / f"{prompts}.jsonl", "exclude_seen": False, "history_prompts": prompts}
        generate(load("generate", {name: str(value) for name, value in flags.items()}))
        told = map(json.loads, flags["output"].read_text().splitlines())
        found.append([dict(zip(row["response_items"], np.exp(row["log_probabilities"]), strict=True)) for row in told])
    alone, (mean, *_) = found
    weights = np.array([1, 0.7, 0.49]) / 2.19
    for item in codes:
        assert mean[item] == pytest.approx(sum(weights * [one[item] for one in alone]), rel=1e-4)
    assert list(mean.values()) == sorted(mean.values(), reverse=True)
    wide = {"output": tmp_path / "wide", "dtype": "fp32"}
    convert(load("convert", {"model": str(run), **{name: str(value) for name, value in wide.items()}}))
    losses = list[float]()
    for model in (run, wide["output"]):
        asked = {
            "model": model,
            "validation_file": rows,
            "cache_dir": tmp_path / "cache",
            "eval_generate_rows": 9,
            "metrics": "recall@6",
        }
        result = evaluate(load("evaluate", {name: str(value) for name, value in asked.items()}))
        assert result.metrics["recall@6"] == 100.0 and result.rows == 9
        losses.append(result.loss)
    assert losses[0] in [pytest.approx(event["loss"]) for event in measured]
    assert losses[0] < losses[1], "without the run's settings the loss is over the vocabulary"


def test_items_that_prompts_write_by_other_tokens_are_not_left_out() -> None:
    tokenizer = train_tokenizer(["an item, an item,item"] * 9, "bpe", 400, 2**20)
    for separator, has_codes in ((",", False), (", ", True), (", ", False)):
        tokenizer.template = Template(histories={"item_separator": separator})
        config = load("generate", {"exclude_seen": "True", "num_beams": "2"})
        if separator == ", " and not has_codes:
            with pytest.raises(UserError, match="exclude_seen"):
                check_excluding(config, tokenizer, has_codes)
        else:
            check_excluding(config, tokenizer, has_codes)
