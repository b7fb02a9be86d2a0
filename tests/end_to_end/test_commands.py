"""What comes after pretraining: finetune, measure, answer; and the tools before it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.end_to_end.conftest import SHAPE, World


@pytest.fixture(scope="module")
def finetuned(pretrained: World) -> World:
    """A finetuned run that continues from the pretrained one by itself."""
    flags = ("--is_finetune=True", f"--train_file={pretrained.pairs}", "--max_seq_len=32", "--mixed_precision=no")
    done = pretrained.place.do("train", *flags, "--run_name=tuned", "--max_steps=12", "--effective_batch_size=8")
    assert f"starting from {pretrained.place.runs / 'whole'}, the newest finished pretraining run" in done.stdout
    return pretrained


def test_finetuning_goes_on_from_the_pretrained_model(finetuned: World) -> None:
    place = finetuned.place
    losses = place.losses("tuned")
    assert losses[12] < losses[1]
    shapes = [json.loads((place.runs / name / "config.json").read_text()) for name in ("whole", "tuned")]
    assert shapes[0]["d_model"] == shapes[1]["d_model"] == 32
    tokenizers = [(place.runs / name / "tokenizer.json").read_bytes() for name in ("whole", "tuned")]
    assert tokenizers[0] == tokenizers[1]
    start = next(event for event in place.events("tuned") if event["event"] == "start")
    assert start["settings"]["vocab_size"] == 512 and start["settings"]["is_finetune"] is True


def test_evaluation_finds_the_loss_that_training_told(finetuned: World) -> None:
    done = finetuned.place.do("evaluate", f"--model={finetuned.place.runs / 'tuned'}")
    told = re.search(r"loss +([\d.]+)", done.stdout)
    evaluations = [event for event in finetuned.place.events("tuned") if event["event"] == "eval"]
    assert told and float(told[1]) == pytest.approx(min(event["loss"] for event in evaluations), abs=1e-3)


def test_answers_to_a_file_of_prompts(finetuned: World, tmp_path: Path) -> None:
    """The newest model is taken; answers stand in the order of the prompts."""
    output = tmp_path / "answers.jsonl"
    flags = ("--max_new_tokens=8", "--generate_batch_size=50", f"--output={output}")
    finetuned.place.do("generate", f"--input={finetuned.pairs}", *flags)
    answers = [json.loads(line) for line in output.read_text("utf8").splitlines()]
    prompts = [json.loads(line)["prompt"] for line in finetuned.pairs.read_text("utf8").splitlines()]
    assert [answer["prompt"] for answer in answers] == prompts
    assert all(isinstance(answer["response"], str) for answer in answers)


def test_tokenizer_then_shards_then_training(world: World, tmp_path: Path) -> None:
    place, tokenizer, shards = world.beside(tmp_path), tmp_path / "tokenizer", tmp_path / "shards"
    source = f"--train_file={world.text}"
    told = place.do("tokenizer", source, f"--tokenizer_dir={tokenizer}", "--vocab_size=400").stdout
    assert "400" in told and f"--tokenizer_dir={tokenizer}" in told
    told = place.do("prepare", source, f"--tokenizer_dir={tokenizer}", f"--shards_dir={shards}").stdout
    assert f"--train_file={shards}" in told
    place.do("train", f"--train_file={shards}", *SHAPE, "--max_steps=3", "--max_seq_len=64", "--run_name=shards")
    assert len(place.losses("shards")) == 3
    assert (place.runs / "shards/tokenizer.json").read_bytes() == (tokenizer / "tokenizer.json").read_bytes()


@pytest.mark.slow
def test_the_saved_folder_gives_the_same_logits_in_transformers(pretrained: World) -> None:
    import torch
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    from model import hf_format

    folder = pretrained.place.runs / "whole"
    tokenizer, theirs = AutoTokenizer.from_pretrained(folder), AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    ours = hf_format.load(folder)
    rows = tokenizer(["the river runs", "春天的河水从石桥下流过"], return_tensors="pt", padding=True)
    decoded = torch.tensor([[0, 7, 8, 9], [0, 30, 31, 1]])
    assert rows.input_ids[0].tolist().count(tokenizer.eos_token_id) == 1
    with torch.no_grad():
        expected = theirs(**rows, decoder_input_ids=decoded).logits
        logits = ours.logits(rows.input_ids, decoded, rows.attention_mask)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
