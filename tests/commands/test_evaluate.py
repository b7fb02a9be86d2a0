"""Loss and scores of a model on rows that the user names, against the same worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from commands.evaluate import evaluate, evaluation_rows
from data.tokenizers.tokenizer import Tokenizer
from memory.processes import ProcessTree
from model import hf_format
from settings.declared import Config
from settings.errors import DoesNotFit
from settings.loading import load
from tests.commands.small import flags_of, read_rows, write_rows
from tests.training.small_trained import save_trained
from training.loaded_model import load_model
from training.saved_model import SavedModel, find_model

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = ["hello", "河水", "<extra_id_0> two\nwords </s>", "a b c d", "last"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and rows whose right answers begin as the model's own: random weights would score nothing."""
    folder = save_trained(tmp_path_factory.mktemp("model"))
    texts = [text.strip() for text in answers_of(flags_of("generate", model=folder, max_new_tokens=12), PROMPTS)]
    rows = [
        {"prompt": prompt, "response": text[: 4 + index] + " 河水 more"[:index] + "."}
        for index, (prompt, text) in enumerate(zip(PROMPTS, texts, strict=True))
    ]
    write_rows(folder / "pairs.jsonl", rows)
    return folder


def answers_of(config: Config, prompts: list[str]) -> list[str]:
    """The answers of a model to prompts, each alone."""
    trained = load_model(config, find_model(config))
    inputs = [[*ids.tolist(), 1] for ids in trained.tokenizer.encode_prompts(prompts)]
    return [trained.tokenizer.decode_with_unknown(trained.writer(config).answers([ids])[0]) for ids in inputs]


def settings(folder: Path, tmp_path: Path, **flags: Any) -> Config:
    folders = {"output_dir": tmp_path / "runs", "log_dir": tmp_path / "logs", "cache_dir": folder / "cache"}
    defaults = {"model": folder, "validation_file": folder / "pairs.jsonl", "mixed_precision": "no", **folders}
    return flags_of("evaluate", **{**defaults, **flags})


def test_loss_and_scores(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The loss is that of the whole model under plain autograd, each row alone; scores are sacreBLEU's own."""
    from sacrebleu.metrics import BLEU, CHRF

    result = evaluate(settings(folder, tmp_path))
    screen = capsys.readouterr().out
    pairs = [(row["prompt"], row["response"]) for row in read_rows(folder / "pairs.jsonl")]
    model = hf_format.load(folder)
    tokenizer = Tokenizer.load(folder)
    losses, tokens = [], []
    for pair in pairs:
        ids, labels = (torch.tensor([[*tokenizer.encode_prompts([text])[0].tolist(), 1]]) for text in pair)
        losses.append(model(ids, labels=labels).item())
        tokens.append(labels.numel())
    assert result.loss == pytest.approx(np.average(losses, weights=tokens), rel=1e-4) and result.rows == len(PROMPTS)
    answers = [text.strip() for text in answers_of(settings(folder, tmp_path), PROMPTS)]
    for name, metric in (("chrf", CHRF()), ("bleu", BLEU()), ("char_bleu", BLEU(tokenize="zh"))):
        score = metric.corpus_score(answers, [[response for _, response in pairs]]).score
        assert result.metrics[name] == pytest.approx(score), name
    assert len(result.metrics) == 12 and result.metrics["chrf"] > 0
    assert "perplexity" in screen and f"{result.metrics['chrf']:.2f}" in screen
    assert "5, scores in percent" in screen and screen.count("reference") == 3


def test_only_what_is_asked_for(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = evaluate(settings(folder, tmp_path, metrics="f1,rouge_l", eval_generate_rows=2, max_new_tokens=3))
    assert list(result.metrics) == ["f1", "rouge_l"] and result.rows == 5
    words = capsys.readouterr().out
    assert "2 of 5, scores in percent" in words and "2 of 2 answers cut at --max_new_tokens=3" in words
    result = evaluate(settings(folder, tmp_path, eval_generate_rows=0, eval_rows=3))
    assert result.metrics == {} and result.rows == 3


def test_the_best_of_several_right_answers_counts(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "pairs.jsonl"
    listed = tmp_path / "colors.txt"
    listed.write_text("a red fox\n")  # The model answers nothing else.
    right = [["a red fox"], ["blue", "a red fox"], ["two red foxes", "blue"], ["green"]]
    write_rows(rows, ({"prompt": "x", "response": answers} for answers in right))
    flags = {"validation_file": rows, "answers": listed, "max_new_tokens": 60, "json": True}
    result = evaluate(settings(folder, tmp_path, **flags, metrics="exact_match,f1,identical,bleu"))
    report = json.loads(capsys.readouterr().out)
    expected = {"exact_match": 50.0, "identical": 50.0, "f1": 100 * (1 + 1 + 2 / 5 + 0) / 4}
    assert {name: result.metrics[name] for name in expected} == pytest.approx(expected)
    assert report["sacrebleu"]["bleu"].startswith("nrefs:var|") and report["answers"] == 4


def test_the_loss_keeps_to_the_budget(folder: Path, tmp_path: Path) -> None:
    base = ProcessTree().usage().anon_bytes
    with pytest.raises(DoesNotFit, match=r"is too small for 4,096 rows .*--eval_batch_size_per_gpu=2048"):
        evaluate(settings(folder, tmp_path, eval_batch_size_per_gpu=4096, memory_budget=base + 2**27))


def test_places_are_those_of_who_evaluates(folder: Path, tmp_path: Path) -> None:
    """The settings beside a model from elsewhere say how its rows were made, and not where anything is written."""
    foreign = {"cache_dir": "/theirs/cache", "log_dir": "/theirs/logs", "weights_dir": "/theirs/weights"}
    saved = load("train", {"train_file": str(folder / "pairs.jsonl"), "max_seq_len": "64", **foreign})
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    for path in folder.iterdir():
        if path.is_file():
            (run_dir / path.name).symlink_to(path)
    saved.save(run_dir / "settings.json")
    merged, _, _ = evaluation_rows(settings(folder, tmp_path, model=run_dir), SavedModel.read(run_dir))
    assert merged.data.max_seq_len == 64
    assert merged.data.cache_dir == str(folder / "cache") and merged.run.log_dir == str(tmp_path / "logs")
    assert merged.memory.weights_dir == "auto"
