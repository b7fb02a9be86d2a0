"""`plan` tells how long the run will take where its steps are known: by flag, or because its data is prepared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from commands import plan as plan_command
from common.units import GIB
from data.prepare.preparing import prepare
from data.sources.files import find
from model.formats.checksums import seal
from settings.errors import DoesNotFit, UserError
from settings.loading import load
from tests.commands.small import flags_of, write_rows
from tests.fake_device import FakeDevice
from tests.training.small_trained import save_trained
from training.report.run_files import SETTINGS_FILE
from training.setup import plan as planning
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


@pytest.mark.parametrize("where", [{"device": "cpu", "compiled_kernels": False}, {"target": "gpu_8gb"}])
def test_blocks_that_shall_be_compiled_are_planned_for(
    where: dict[str, object], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ways in which they are not, as with offloaded weights, are no alternatives."""
    monkeypatch.setenv("CXX", "cat")  # Any program: nothing is compiled.
    result = planned(capsys, compile=True, mixed_precision="no", **where)
    assert result["plan"]["choice"]["compiled"]
    assert result["modes"]["low"]["choice"]["compiled"] and result["modes"]["ultra"] is None


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
    longest = planned(capsys, **{**flags, "train_file": tmp_path / "elsewhere.jsonl"}, max_steps=50)["plan"]
    prepare(flags_of("train", prepare_workers=0, **flags))
    prepared = planned(capsys, **flags, max_steps=50)["plan"]
    assert prepared["seconds_total"] < longest["seconds_total"] / 2, (
        "without rows they are as long as the settings allow"
    )
    assert sampled["peak_bytes"] == pytest.approx(prepared["peak_bytes"], rel=0.05)
    assert sampled["seconds_total"] == pytest.approx(prepared["seconds_total"], rel=0.2)
    assert prepared["seconds"] < longest["seconds"], "the plan is that of the run"
    assert planned(capsys, **flags)["plan"]["seconds_total"] is not None, "the steps follow from the rows"


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


def test_the_table_of_an_encoder_fits_its_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", ({"text": "MKV" * n, "label": "HEC" * n} for n in range(1, 33)))
    flags = {"train_file": rows, "head": "token", "cache_dir": tmp_path / "c", "max_steps": 5}
    fitted, named_size = (
        planned(capsys, **flags, **more)["plan"]["components"]["weights"] for more in ({}, {"vocab_size": 128})
    )
    assert fitted == named_size


def test_a_sample_is_told_and_so_is_what_it_may_miss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Short rows fit where rows as long as the settings allow do not; what does not fit by the sample is refused with a
    word on it.
    """
    flags = {
        "train_file": write_rows(tmp_path / "rows.jsonl", [{"prompt": "what is 2 plus 2?", "response": "4"}] * 200),
        "tokenizer_type": "byte",
        "max_seq_len": 4096,
        "cache_dir": tmp_path / "c",
        "is_finetune": True,
        "finetune_from": "none",
        "memory_budget": "512M",
        "effective_batch_size": 16,
    }
    result = planned(capsys, **flags, memory_mode="standard")
    (line,) = [reason for reason in result["plan"]["reasons"] if "if all rows were" in reason]
    assert line.startswith("it fits with these lengths") and result["plan"]["peak_bytes"] < 512 * 2**20
    with pytest.raises(DoesNotFit) as refused:
        plan_command.plan(flags_of("plan", **{**flags, "memory_budget": "64M"}))
    assert "all 200 rows" in refused.value.problems[-1]


def test_the_page_tells_the_time_or_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, words in (
        ({"max_steps": "5"}, "about"),
        ({}, "for 1,000 steps (add --train_file or --max_steps"),
    ):
        plan_command.plan(load("plan", {**SHAPE, "json": "False", **flags}))
        (line,) = [line for line in capsys.readouterr().out.splitlines() if line.strip().startswith("time ")]
        assert words in line


def test_the_device_is_the_one_that_train_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    card = FakeDevice(GIB, name="fake GPU")
    monkeypatch.setattr(planning, "pick", lambda requested: card)
    monkeypatch.setattr(plan_command, "may_have_gpu", lambda: True)
    monkeypatch.setattr(plan_command, "call", lambda function, *requested, **limits: planning.machine_for(*requested))
    result = planned(capsys, memory_budget="2G")
    assert result["machine"]["device"] == "fake device" and result["machine"]["has_own_memory"]
    assert 0 < result["plan"]["budget_bytes"] <= GIB
    assert planned(capsys, device="cpu")["machine"]["device"] == ""
    monkeypatch.undo()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UserError, match="--device = cuda"):
        planned(capsys, device="cuda")


def test_several_targets_are_planned_in_one_go(capsys: pytest.CaptureFixture[str]) -> None:
    flags = {"model_preset": "t5-3b", "memory_budget": "auto", "weights_in": "device"}
    small, large = planned(capsys, target="laptop_8gb, gpu_24gb", **flags)
    assert small["exit_code"] == 3 and "memory_budget" in small["problems"][0]
    assert large["plan"]["peak_bytes"] < large["plan"]["budget_bytes"]


def test_the_same_flags_give_the_same_figures_in_every_table(capsys: pytest.CaptureFixture[str]) -> None:
    """A change that is proposed, a mode that is shown, and the plan of the very flags: one peak, one time."""
    flags = {"model_preset": "t5-base", "memory_budget": "8G", "max_steps": 10}
    first = planned(capsys, **flags)
    assert first["changes"] and any(change["label"].startswith("memory_budget=") for change in first["changes"])
    for change in first["changes"][:2]:
        name, _, value = change["label"].partition("=")
        again = planned(capsys, **{**flags, name: value})["plan"]
        assert (again["peak_bytes"], again["seconds"]) == (change["peak_bytes"], change["seconds"]), change["label"]
        assert change["peak_bytes"] < first["plan"]["peak_bytes"]
    again = planned(capsys, **flags, memory_mode="ultra")["plan"]
    assert again["peak_bytes"] == first["modes"]["ultra"]["peak_bytes"]


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
    elsewhere = {**SHAPE, "model_preset": "t5-small", "is_finetune": "True", "finetune_from": "google/flan-t5-small"}
    plan_command.plan(load("plan", {**elsewhere, "json": "False"}))
    assert "planned for --model_preset=t5-small" in capsys.readouterr().out
    preferences = {"objective": "preferences", "output_dir": tmp_path, "json": False}
    plan_command.plan(flags_of("plan", **{**SHAPE, **preferences}))
    assert "planned for --model_preset=tiny" in capsys.readouterr().out, "a base may still have to be trained"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"freeze": "*"}, "leaves nothing to train"),
        ({"lora_rank": 8}, "a base to adapt is needed"),
        ({"run_name": "../x"}, "--run_name = ../x"),
        ({"train_file": "rows.jsonl", "mixture_weights": "1,2"}, "2 weights for 1 part"),
    ],
)
def test_what_train_refuses_is_not_planned(
    flags: dict[str, object],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(Path("rows.jsonl"), ({"text": f"word {n}"} for n in range(200)))
    with pytest.raises(UserError) as refused:
        planned(capsys, tokenizer_type="byte", cache_dir="cache", **flags)
    assert words in " ".join(refused.value.problems)


def test_a_plan_says_what_the_run_starts_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = {"output_dir": tmp_path / "runs", "is_finetune": True}
    (line,) = planned(capsys, **flags)["start"]
    assert "random weights" in line and "--finetune_from" in line
