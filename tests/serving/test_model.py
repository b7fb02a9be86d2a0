"""A model in Python gives what the commands give, inside a budget, from a checkout and as it is installed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from commands.embed import embed
from commands.generate import generate
from serving.model import Model
from settings.errors import DoesNotFit, UserError
from settings.loading import load
from tests.training.small_trained import SHAPE, save_trained

PROMPTS = ["what flows <extra_id_0> the bridge?", "", "河水从桥下流过", "a"]
SETTINGS = {"device": "cpu", "num_threads": 1, "mixed_precision": "no"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_trained(tmp_path / "model")


def test_it_answers_as_the_command_does(folder: Path, tmp_path: Path) -> None:
    (folder / "generation_config.json").write_text('{"num_beams": 2, "max_new_tokens": 9}')
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS), encoding="utf8")
    output = tmp_path / "answers.jsonl"
    files = {"input": str(prompts), "output": str(output), "skip_bad_rows": "True"}
    generate(load("generate", {**SETTINGS, **files, "model": str(folder)}))
    expected = [json.loads(line)["response"] for line in output.read_text(encoding="utf8").splitlines()]
    model = Model(folder, **SETTINGS)
    assert model.answer(PROMPTS) == expected and expected[1] == "" and all(expected[:1] + expected[2:])
    assert model.answer(PROMPTS[:1]) == expected[:1], "again, by the model that is loaded"
    assert Model(folder, num_beams=1, **SETTINGS).answer(PROMPTS) != expected, "what is named goes before the folder"


def test_it_embeds_as_the_command_does(tmp_path: Path) -> None:
    folder = save_trained(tmp_path / "encoder", shape=replace(SHAPE, num_decoder_layers=0, head="none"))
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("one", "two longer texts")))
    output = tmp_path / "vectors.npz"
    embed(load("embed", {**SETTINGS, "model": str(folder), "input": str(texts), "output": str(output)}))
    vectors = Model(folder, **SETTINGS).embed(["one", "two longer texts"])
    np.testing.assert_allclose(np.stack(vectors), np.load(output)["vectors"], atol=1e-6)
    with pytest.raises(UserError, match="which generate does not take"):
        Model(folder, **SETTINGS).answer(["hello"])


def test_the_budget_holds_or_is_refused(folder: Path) -> None:
    model = Model(folder, **SETTINGS, max_new_tokens=4)
    assert model.answer(["hello"], memory_budget="4G") == model.answer(["hello"])
    with pytest.raises(DoesNotFit, match="--memory_budget"):
        model.answer(["hello"], memory_budget="64M")
