"""`plan` tells how long the run will take where its steps are known: by flag, or because its data is prepared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from commands import plan as plan_command
from data.prepare.preparing import prepare
from data.sources.files import find
from model.formats.checksums import seal
from settings.errors import UserError
from settings.loading import load
from tests.commands.small import flags_of, write_rows
from tests.training.small_trained import save_trained
from training.report.run_files import SETTINGS_FILE
from training.setup.answer_list import read_list

pytestmark = pytest.mark.usefixtures("processor_class")
SHAPE = {"model_preset": "tiny", "effective_batch_size": "8", "memory_budget": "1G", "json": "True"}


def planned(capsys: pytest.CaptureFixture[str], **flags: object) -> Any:
    plan_command.plan(flags_of("plan", **{**SHAPE, **flags}))
    return json.loads(capsys.readouterr().out)


def test_steps_that_are_named_give_the_time(capsys: pytest.CaptureFixture[str]) -> None:
    unknown = planned(capsys)["plan"]
    assert unknown["seconds"] > 0 and unknown["seconds_total"] is None
    few, many = (planned(capsys, max_steps=steps)["plan"] for steps in (100, 1000))
    assert 0 < few["seconds_low"] < few["seconds_total"] < few["seconds_high"] < many["seconds_total"]
    assert few["seconds_total"] > 100 * few["seconds"]


def test_rows_that_are_prepared_count_with_their_lengths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = {
        "train_file": write_rows(tmp_path / "rows.jsonl", [{"prompt": "p" * 10, "response": "r" * 10}] * 200),
        "tokenizer_type": "byte",
        "max_seq_len": 512,
        "cache_dir": tmp_path / "c",
        "objective": "pairs",
    }
    guessed = planned(capsys, **flags)["plan"]
    assert guessed["seconds_total"] > 0 and "time: for about 200 rows" in guessed["reasons"][-1]
    assert not (tmp_path / "c").exists(), "nothing is prepared by asking"
    sampled = planned(capsys, **flags, max_steps=50)["plan"]
    assert "all 200 rows" in sampled["reasons"][-2]
    prepare(flags_of("train", prepare_workers=0, **flags))
    prepared = planned(capsys, **flags, max_steps=50)["plan"]
    assert sampled["peak_bytes"] == pytest.approx(prepared["peak_bytes"], rel=0.05)
    assert sampled["seconds_total"] == pytest.approx(prepared["seconds_total"], rel=0.2)
    assert planned(capsys, **flags)["plan"]["seconds_total"] is not None, "the steps follow from the rows"


def test_several_targets_are_planned_in_one_go(capsys: pytest.CaptureFixture[str]) -> None:
    flags = {"model_preset": "t5-3b", "memory_budget": "auto", "weights_in": "device"}
    small, large = planned(capsys, target="laptop_8gb, gpu_24gb", **flags)
    assert small["exit_code"] == 3 and "memory_budget" in small["problems"][0]
    assert large["plan"]["peak_bytes"] < large["plan"]["budget_bytes"]


def test_a_run_that_goes_on_is_planned_by_what_it_has_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", ({"text": f"word {n}"} for n in range(200)))
    flags = {"train_file": rows, "d_ff": 64, "cache_dir": tmp_path / "c", "max_steps": 10}
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    words = {**SHAPE, **{name: str(value) for name, value in flags.items()}, "run_name": "mine"}
    words_of_run = {name: value for name, value in words.items() if name != "json"}
    saved = load("train", words_of_run).as_dict()
    (tmp_path / "runs" / "mine" / SETTINGS_FILE).write_text(json.dumps(saved))
    goes_on = {
        "is_keep_training": "True",
        "run_name": "mine",
        "output_dir": str(tmp_path / "runs"),
        "cache_dir": str(tmp_path / "c"),
    }
    plan_command.plan(load("plan", {**goes_on, "json": "True"}))
    result = json.loads(capsys.readouterr().out)["plan"]
    requested = planned(capsys, **flags)["plan"]
    assert (result["peak_bytes"], result["seconds"]) == (requested["peak_bytes"], requested["seconds"])
    (checkpoint := tmp_path / "runs" / "mine" / "checkpoints" / "step_00000009").parent.mkdir()
    seal(save_trained(checkpoint, shape=load("train", words_of_run).model))
    plan_command.plan(load("plan", {**goes_on, "json": "True", "overwrite": "False"}))
    remaining = json.loads(capsys.readouterr().out)["plan"]
    assert remaining["seconds_total"] < result["seconds_total"], "one step is left"


def test_a_checkpoint_gives_the_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a run would start from is what is planned, and is told first."""
    folder = save_trained(tmp_path / "base")
    flags = {"is_finetune": True, "finetune_from": folder, "max_steps": 5, "json": False}
    plan_command.plan(flags_of("plan", **{**SHAPE, **flags}))
    page = capsys.readouterr().out
    assert page.startswith(f"starting from {folder}\n") and "d_model 16, 1 + 2 blocks, vocabulary 384" in page
    with pytest.raises(UserError, match="hf download"):
        plan_command.plan(load("plan", {"is_finetune": "True", "finetune_from": "google/flan-t5-small"}))


def test_preferences_are_planned_before_there_is_a_base(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    preferences = {"objective": "preferences", "output_dir": tmp_path, "json": False}
    plan_command.plan(flags_of("plan", **{**SHAPE, **preferences}))
    assert "planned for --model_preset=tiny" in capsys.readouterr().out


def test_a_list_of_answers_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "p", "response": "7"}] * 20)
    (tmp_path / "answers.txt").write_text("".join(f"{number * number}\n" for number in range(20_000)))
    flags = {
        "train_file": rows,
        "is_finetune": True,
        "finetune_from": "none",
        "tokenizer_type": "byte",
        "cache_dir": tmp_path / "c",
    }
    without, listed = planned(capsys, **flags), planned(capsys, **flags, answers=tmp_path / "answers.txt")
    more = listed["plan"]["components"]["base"] - without["plan"]["components"]["base"]
    config = flags_of("train", **flags)
    tree = read_list(config, find(str(tmp_path / "answers.txt"), ""), prepare(config).tokenizer_dir).tree
    assert more == pytest.approx(tree.num_bytes, rel=0.1) and "answers.txt" in listed["start"][-1]
    listed = planned(capsys, **flags, answers=tmp_path / "answers.txt")["plan"]["components"]["base"]
    assert listed - without["plan"]["components"]["base"] == tree.num_bytes
