"""A model in Python gives what the commands give, inside a budget, from a checkout and as it is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
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

ROOT = Path(__file__).resolve().parent.parent.parent
PROMPTS = ["what flows below the bridge?", "", "河水从桥下流过", "a"]
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


def test_a_head_over_labels_answers_as_the_command_does(tmp_path: Path) -> None:
    shape = replace(SHAPE, num_decoder_layers=0, head="sequence", labels="few,many")
    folder = save_trained(tmp_path / "head", shape=shape)
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("one", "two longer texts")))
    output = tmp_path / "labels.jsonl"
    generate(load("generate", {**SETTINGS, "model": str(folder), "input": str(texts), "output": str(output)}))
    rows = [json.loads(line) for line in output.read_text(encoding="utf8").splitlines()]
    answers = Model(folder, **SETTINGS).answer(["one", "", "two longer texts"])
    assert [answer["label"] for answer in answers] == [rows[0]["label"], None, rows[1]["label"]]
    assert answers[0]["probabilities"] == pytest.approx(rows[0]["probabilities"], abs=1e-5)


def test_the_budget_holds_or_is_refused(folder: Path) -> None:
    model = Model(folder, **SETTINGS, max_new_tokens=4)
    assert model.answer(["hello"], memory_budget="4G") == model.answer(["hello"])
    with pytest.raises(DoesNotFit, match="--memory_budget"):
        model.answer(["hello"], memory_budget="64M")


@pytest.mark.slow  # The same of an installed package is tested beside its wheel.
def test_one_import_from_a_checkout(folder: Path) -> None:
    words = (
        f"from frugalt5 import Model; (answer,) = Model({str(folder)!r}, device='cpu').answer(['hello']); assert answer"
    )
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", words], cwd=folder, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
