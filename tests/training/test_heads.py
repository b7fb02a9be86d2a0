"""Runs of encoders with a head: they go on exactly, and their folders hold what they have learnt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from model.formats.shape_file import read_config
from tests.training.small_runs import configuration, events
from trainer_low_mem import LowMemTrainer
from training.report.endings import STOP, Interrupted

HEAD = {
    "head": "token",
    "num_layers": 2,
    "max_steps": 4,
    "save_steps": 4,
    "eval_steps": 4,
    "optimizer": "adamw",
    "sample_rows": 2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a run `whole`."""
    folder = tmp_path_factory.mktemp("heads")
    texts = ["ABCA", "BCAAB", "CACB", "AABBCC", "CBA", "ABAB", "BBCA", "CCAB"] * 4
    rows = [{"text": text, "label": ["vowel" if letter == "A" else "other" for letter in text]} for text in texts]
    (folder / "text.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf8")
    LowMemTrainer(configuration(folder, "whole", **flags_of(folder))).train()
    return folder


def flags_of(folder: Path) -> dict[str, object]:
    return {"train_file": folder / "text.jsonl", "num_decoder_layers": 0, **HEAD}


def result(folder: Path, name: str) -> dict[str, list[float]]:
    """The losses of a run, and the weights of its last checkpoint."""
    losses = {"loss": [event["loss"] for event in events(folder, name, "step")]}
    (file,) = (folder / "runs" / name / "checkpoints" / "latest").glob("*model.safetensors")
    return losses | {key: value.tolist() for key, value in load_file(file).items()}


def stopped_and_resumed(folder: Path, name: str, **flags: object) -> dict[str, list[float]]:
    """The result of a run that was stopped behind its second step."""

    def stop(event: dict[str, object]) -> str | None:
        return STOP if event["event"] == "step" and event["step"] == 2 else None

    with pytest.raises(Interrupted):
        LowMemTrainer(configuration(folder, name, **flags_of(folder), **flags), callbacks=[stop]).train()
    LowMemTrainer(configuration(folder, name, **flags_of(folder), **flags, is_keep_training=True)).train()
    return result(folder, name)


def test_a_resumed_run_goes_on_exactly(folder: Path) -> None:
    shape = read_config(folder / "runs" / "whole")
    assert (shape.head, set(shape.label_names), shape.num_decoder_layers) == ("token", {"other", "vowel"}, 0)
    assert stopped_and_resumed(folder, "cut") == result(folder, "whole")


def test_predicted_labels_are_shown_beside_the_right_ones(folder: Path) -> None:
    samples = events(folder, "whole", "sample")
    assert samples, "of rows held out"
    for sample in samples:
        right = ["vowel" if letter == "A" else "other" for letter in sample["prompt"]]
        assert sample["reference"].split() == right and len(sample["answer"].split()) == len(right)


@pytest.mark.slow
def test_a_head_learns_beside_adapters_and_is_saved_with_them(folder: Path) -> None:
    flags = {"finetune_from": folder / "runs" / "whole", "lora_rank": 2, "lora_base": "int8"}
    cut = stopped_and_resumed(folder, "lora_cut", **flags)
    LowMemTrainer(configuration(folder, "lora", **flags_of(folder), **flags)).train()
    assert cut == result(folder, "lora")
    began = load_file(folder / "runs" / "whole" / "model.safetensors")["classifier.weight"].tolist()
    assert cut["base_model.model.classifier.weight"] != began
