"""Every command makes the same ids of the same prompts and answers, special tokens in them included."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from starlette.testclient import TestClient

import commands.chat
import training.evaluation.answers
from commands.evaluate import evaluate
from commands.generate import generate
from data.batches.loader import StepLoader
from data.prepare.preparing import prepare
from data.tokenizers.tokenizer import Tokenizer
from serving.app import make_app
from serving.server import api_of
from settings.declared import Config
from settings.loading import load
from tests.data.loaders import loader_of
from tests.training.small_trained import SHAPE, save_trained
from training.loaded_model import load_model
from training.saved_model import find_model

PROMPTS = [
    "<extra_id_0>rain and snow",
    "a </s>strike</s> of <pad>",
    "run {x}\n  y <unk>",
    "e\u0301 ﾊﾞ plain",
    "so<task> is",
]
ANSWERS = ["wet <extra_id_1> cold", "old </s> new", "{y}", "ok<task>", "  yes"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer is a SentencePiece model with sentinels, line ends, braces and a special token added."""
    folder, out = tmp_path_factory.mktemp("model"), io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["rain and snow, a strike of old and new: run wet cold, so plain it is"] * 20),
        vocab_size=80,
        model_writer=out,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    save_trained(folder, shape=replace(SHAPE, vocab_size=256))
    (folder / "tokenizer.json").unlink()
    (folder / "spiece.model").write_bytes(out.getvalue())
    size = sentencepiece.SentencePieceProcessor(model_proto=out.getvalue()).get_piece_size()
    added = {text: size + 100 + number for number, text in enumerate(("\n", "{", "}", "<task>"))}
    (folder / "added_tokens.json").write_text(json.dumps(added))
    special = [*(f"<extra_id_{number}>" for number in range(100)), "<task>"]
    names = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>", "additional_special_tokens": special}
    about = {**names, "extra_ids": 100, "tokenizer_class": "T5Tokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    (folder / "special_tokens_map.json").write_text(json.dumps(names))
    rows = [{"prompt": prompt, "response": answer} for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)]
    for name, content in (
        ("pairs", rows),
        ("preferences", [{**row, "chosen": row["response"], "rejected": "no"} for row in rows]),
    ):
        lines = "".join(json.dumps(row) + "\n" for row in content)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf8")
    return folder


def settings(command: str, folder: Path, parent: Path, **flags: Any) -> Config:
    defaults = {"max_seq_len": 64, "output_dir": parent / "runs"}
    if command in ("train", "dpo", "evaluate"):
        defaults |= {"cache_dir": parent / "cache"}
    return load(command, {name: str(value) for name, value in {**defaults, **flags}.items()})


def rows_of(loader: StepLoader) -> tuple[list[list[int]], list[list[int]]]:
    """Ids of the prompts and of the (chosen) answers, in the order of the file."""
    batches = [loader.batch_of(np.array([number])) for number in range(loader.num_rows)]
    prompts = [batch.input_ids[0, : batch.input_lengths[0]].tolist() for batch in batches]
    answers = [batch.labels[0, : batch.target_lengths[0]].tolist() for batch in batches]
    return prompts, answers


@pytest.mark.parametrize("with_template", [False, True])
def test_every_command_makes_the_same_ids(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_template: bool
) -> None:
    template = {"prompt_template": "chat"} if with_template else {}
    inputs: dict[str, list[list[int]]] = {"evaluate": [], "generate": [], "chat": [], "serve": []}
    data = {"tokenizer_dir": folder, "validation_file": "none", **template}
    trained = settings(
        "train",
        folder,
        tmp_path,
        train_file=folder / "pairs.jsonl",
        is_finetune=True,
        **{**data, "validation_file": folder / "pairs.jsonl"},
    )
    prepared = prepare(trained)
    prompts, answers = rows_of(loader_of(prepared.train_dir, prepared.objective, trained, False))
    preferred = settings(
        "dpo",
        folder,
        tmp_path,
        train_file=folder / "preferences.jsonl",
        **{**data, "validation_file": folder / "preferences.jsonl"},
    )
    of_preferences = prepare(preferred)
    dpo_prompts, dpo_answers = rows_of(loader_of(of_preferences.train_dir, of_preferences.objective, preferred, False))
    assert (sorted(dpo_prompts), sorted(dpo_answers)) == (sorted(prompts), sorted(answers))

    tokenizer = Tokenizer.load(folder)
    worded = [f"User: {prompt}\nAssistant:" if with_template else prompt for prompt in PROMPTS]
    for texts, ids in ((worded, prompts), (ANSWERS, answers)):
        assert sorted(ids) == sorted([*encoded.tolist(), 1] for encoded in tokenizer.encode_prompts(texts))
    (end,), (brace,) = tokenizer.encode_batch(["\n"]), tokenizer.encode_batch(["{"])
    flat = [number for ids in prompts for number in ids[:-1]]
    assert {tokenizer.sentinel_ids[0], tokenizer.token_to_id("<task>"), end[0], brace[0]} <= set(flat)
    assert tokenizer.eos_id not in flat and tokenizer.pad_id not in flat

    def spying(name: str, original: Any) -> Any:
        def call(*arguments: Any, **how: Any) -> Any:
            rows = arguments[0 if name == "serve" else 1]  # behind the model, which the server's decoder has
            inputs[name] += [list(rows)] if name == "chat" else [list(getattr(row, "ids", row)) for row in rows]
            return original(*arguments, **how)

        return call

    used = {"model": folder, "max_new_tokens": 1, "mixed_precision": "no", **template}
    answers_of = training.evaluation.answers.write
    monkeypatch.setattr(commands.chat, "stream", spying("chat", commands.chat.stream))
    monkeypatch.setattr(training.evaluation.answers, "write", spying("evaluate", answers_of))
    evaluate(settings("evaluate", folder, tmp_path, validation_file=folder / "pairs.jsonl", **used))
    monkeypatch.setattr(training.evaluation.answers, "write", spying("generate", answers_of))
    generate(
        settings("generate", folder, tmp_path, input=folder / "pairs.jsonl", output=tmp_path / "out.jsonl", **used)
    )
    single = [prompt for prompt in PROMPTS if "\n" not in prompt]
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{prompt}\n" for prompt in single)))
    commands.chat.chat(settings("chat", folder, tmp_path, history_turns=0, **used))

    config = settings("serve", folder, tmp_path, **used)
    api = api_of(load_model(config, find_model(config)), config.data, config.generate)
    monkeypatch.setattr(api.engine.decoder, "join", spying("serve", api.engine.decoder.join))
    with TestClient(make_app(api, "", ("box",)), base_url="http://127.0.0.1:8400") as client:
        for prompt in PROMPTS:
            body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 1}
            assert client.post("/v1/chat/completions", json=body).status_code == 200
    assert sorted(inputs["evaluate"]) == sorted(inputs["generate"]) == sorted(inputs["serve"]) == sorted(prompts)
    assert sorted(inputs["chat"]) == sorted(
        [*encoded.tolist(), 1]
        for text, encoded in zip(worded, tokenizer.encode_prompts(worded), strict=True)
        if "{x}" not in text
    )
